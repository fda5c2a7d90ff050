"""Requests whose keys and values are known, and what each of their rows has to get from attention: the
plain loop over what it may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from engine.attention.backend import (
    AttentionNeeds,
    AttentionOptions,
    KVShape,
    build_attention,
    choose_backend,
)
from engine.batch import InputBatch, InputBuffers, RequestRows, build_batch, slot_of
from engine.kernels.paged_attention import attended
from engine.request.info import Determinism
from kvpool.store import KVStore
from worlds.interpreted import DEVICE
from worlds.tiny_models import CPU, path_to, scattered_table

PLAIN = AttentionOptions(None, None, None, None)
NUM_SLOTS = 3840
Part = tuple[int, int, int, Sequence[int]]
"""A part of a step: text, base, known rows, parents."""
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class World:
    """Texts of random rows; text ``number`` has the same rows wherever it is used."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        size: int = 16,
        kv_dtype: torch.dtype | None = None,
        backend: str = "paged",
        determinism: Determinism = "exact",
        device: torch.device = CPU,
    ) -> None:
        shape = KVShape(heads, kv_heads, key_dim, value_dim)
        self.needs = AttentionNeeds(determinism, device, dtype, size, [shape], kv_dtype)
        self.backend = backend
        self.size, self.dtype = size, dtype
        self.num_blocks = NUM_SLOTS // size
        self._shapes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))

    def rows(self, number: int, length: int) -> list[torch.Tensor]:
        """Queries, keys and values of its first ``length`` tokens."""
        generator = torch.Generator().manual_seed(number)
        made = [torch.randn(1024, *shape, generator=generator) * 1.5 for shape in self._shapes]
        return [each[:length].to(self.dtype) for each in made]

    def tables(self, lengths: Sequence[int]) -> list[list[int]]:
        """Scattered blocks for each of the requests."""
        needed = [-(-length // self.size) for length in lengths]
        every = scattered_table(3, self.num_blocks, first=0, among=self.num_blocks)
        ends = [sum(needed[: index + 1]) for index in range(len(needed))]
        return [every[end - count : end] for end, count in zip(ends, needed, strict=True)]

    def step(
        self,
        parts: Sequence[Part],
        options: AttentionOptions = PLAIN,
        stored: int = 0,
        first_keys: Sequence[int] = (),
    ) -> list[torch.Tensor]:
        """Outputs of each request's rows. ``stored``: of each tree's nodes; ``first_keys``: of each
        request."""
        store, batch, rows = self.lay(parts, stored, first_keys)
        backend = self.over(store)
        plan = backend.plan(batch, InputBuffers(self.needs.device, 512).fill(batch))
        output = plan.attend(0, *rows, options).cpu()
        return list(output.split([each.num_rows for each in batch.requests]))

    def over(self, store: KVStore) -> Any:
        return build_attention(self.needs, store, self.backend)

    def lay(
        self, parts: Sequence[Part], stored: int = 0, first_keys: Sequence[int] = ()
    ) -> tuple[KVStore, InputBatch, list[torch.Tensor]]:
        """A store with what came before the step; its batch; its queries, keys and values. The nodes of a
        tree go on with the rows of its text, one after another."""
        device = self.needs.device
        store = choose_backend(self.backend, self.needs).make_store(self.needs, self.num_blocks)
        lengths = [base + known + len(parents) for _, base, known, parents in parts]
        requests, new = [], []
        for (text, base, known, parents), table in zip(parts, self.tables(lengths), strict=True):
            query, key, value = self.rows(text, base + known + len(parents))
            past = base + stored
            slots = torch.tensor([slot_of(table, place, self.size) for place in range(past)] or [0])
            store.write(0, slots[:past].to(device), key[:past].to(device), value[:past].to(device))
            count = known + len(parents) - stored
            requests.append(RequestRows([0] * count, known, base, parents, table, count, stored))
            new.append((query[past:], key[past:], value[past:]))
        for request, first_key in zip(requests, first_keys, strict=bool(first_keys)):
            request.first_key = first_key
        rows = [torch.cat(each).to(device) for each in zip(*new, strict=True)]
        return store, build_batch(requests, self.size), rows

    def expected(self, part: Part, options: AttentionOptions, first_key: int = 0) -> torch.Tensor:
        """Returns the rows' outputs by the definition, in float64."""
        text, base, known, parents = part
        query, key, value = self.rows(text, base + known + len(parents))
        if self.needs.kv_dtype is not None:
            key, value = key.to(self.needs.kv_dtype).float(), value.to(self.needs.kv_dtype).float()
        query, key, value = query.double(), key.double(), value.double()
        share = query.shape[1] // key.shape[1]
        scale = query.shape[2] ** -0.5 if options.scaling is None else options.scaling
        outputs = []
        for row in range(known + len(parents)):
            node = row - known
            seen = list(range(first_key, min(base + row + 1, base + known)))
            if node >= 0:
                seen += [base + known + each for each in path_to(node, parents)]
            if options.window is not None:
                seen = seen[-options.window :]
            if node < 0 and options.sees_block:
                seen += range(base + row + 1, base + known)
            outputs += [
                attended(
                    query[base + row, head].numpy(),
                    key[seen, head // share].numpy(),
                    value[seen, head // share].numpy(),
                    scale,
                    options.softcap,
                    None if options.sinks is None else float(options.sinks[head]),
                )
                for head in range(query.shape[1])
            ]
        return torch.from_numpy(np.stack(outputs)).view(-1, query.shape[1], value.shape[2])


def chains(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


def world_of(
    backend: str,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    size: int = 16,
    kv_dtype: torch.dtype | None = None,
    determinism: Determinism = "exact",
) -> World:
    """``shape``: heads, key heads, dimensions of keys and of values."""
    heads, kv_heads, key_dim, value_dim = shape
    device = DEVICE if backend == "triton" else CPU
    determinism = "fast" if backend == "sdpa" else determinism
    return World(
        heads, kv_heads, key_dim, value_dim, dtype, size, kv_dtype, backend, determinism, device
    )


@st.composite
def parts(draw: Any, bases: Sequence[tuple[int, int]]) -> list[Part]:
    """Draws ragged steps: chunks, chains and trees of texts, beside each other."""
    found: list[Part] = []
    for text in range(draw(st.integers(1, 3))):
        base = draw(st.one_of(*(st.integers(*each) for each in bases)))
        num_nodes = draw(st.sampled_from([0, 0, 1, 3, 6, 35]))
        parents = draw(
            st.one_of(
                st.just(chains(num_nodes)),
                st.tuples(*(st.integers(-1, node - 1) for node in range(num_nodes))),
            )
        )
        found.append((text, base, draw(st.sampled_from([1, 1, 2, 9, 19])), parents))
    return found
