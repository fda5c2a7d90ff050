"""Attention that gives a row the same bits whatever shares its step.

What changes a row's bits is the shape of a call: another number of rows or keys may select another order
of summation, and in some kernels a row's place among the others does. And a draft tree that is masked
where it lies leaves skipped keys between a node's ancestors, which changes how a kernel groups its sums:
so its rows read their keys in the order of their text (``paths.py``). Calls keep to shapes that a probe
at load found to keep bits.

The candidates, cheapest first. Attention written out as products, with values summed over 384 or 256
keys at a time, so that sums have one length (the last of them less, if that changes nothing): over rows
as they come, padded to a multiple of 1, 2 or 4 (a few rows have kernels of their own), then in tiles of 4
rows and of 1. Measured: with AVX-512 and with AMX the first kind holds in fp32, fp16 and bf16; MKL's fp32
products with AVX2 need tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import ClassVar, NamedTuple

import torch

from drafters.tree import chain_length
from engine.attention.backend import AttentionNeeds, AttentionOptions, KVShape, attention_backend
from engine.attention.paths import side_paths
from engine.attention.products import (
    FREE_KEY_MULTIPLE,
    MOST_HEADS_APART,
    CallShapes,
    Limits,
)
from engine.attention.sdpa import NUM_ROWS_ALONE, Branch, SdpaAttention, SdpaPlan
from engine.batch import InputBuffers, RequestRows, build_batch, slot_of
from engine.config import Determinism
from kvpool.store import KVStore

EXACT_KEY_CHUNK = 256

# Keys that a row sees; then branches, rows and keys of the calls, long pasts after short ones.
_FEW, _SOME, _MANY = 125, 509, 1021
_PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 17, 20, 24, 31, 32, 33, 40, 48, 64, 100, 128, 256)
_PROBED_CALLS = (
    *((_FEW, (1, rows, 256)) for rows in _PROBED_ROWS),
    *((_FEW, (1, rows, 128)) for rows in _PROBED_ROWS[::3]),
    *((_FEW, (branches, rows, 256)) for branches in (3, 8) for rows in (1, 5, 17)),
    *((_SOME, (1, rows, 640)) for rows in (1, 5, 24)),
    *((_MANY, (1, rows, 1152)) for rows in (1, 5, 24)),
    *((_FEW, (1, rows, 1024)) for rows in (1, 5, 12, 48)),
    *((_SOME, (branches, rows, 512)) for branches in (1, 3) for rows in (1, 2, 8, 20)),
    *((_MANY, (1, rows, 1024)) for rows in (1, 2, 3, 5, 8, 16, 20, 33, 48)),
    *((_MANY, (branches, rows, 2048)) for branches in (1, 3) for rows in (1, 4, 12)),
)
# Branches of a call, and rows of each that see the same keys, not all in the order of their text.
_PROBED_TREES = ((1, 1), (1, 3), (1, 8), (3, 2), (8, 5))
_DISTINCT_ROWS = 8
_BLOCK_SIZE = 16


@attention_backend("exact")
class ExactAttention(SdpaAttention):
    """Whole draft trees only: one fed level by level would leave its branches apart."""

    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"exact"})

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.calls, self.failures = exact_calls(needs)

    def branches(self, request: RequestRows) -> list[Branch]:
        """One, but where a long chunk ends in a tree: it goes through in pieces, and a tree whole."""
        if request.num_stored:
            raise ValueError("exact attention takes whole draft trees only")
        (branch,) = super().branches(request)
        whole = replace(branch, tree=None, paths=side_paths(request))
        if not whole.paths or request.num_rows <= NUM_ROWS_ALONE:
            return [whole]
        root_end, chain = request.base + request.num_known, chain_length(request.parents)
        cut, end = request.num_known + chain, root_end + chain
        paths = [replace(path, rows=[row - cut for row in path.rows]) for path in whole.paths]
        first = replace(whole, rows=whole.rows[:cut], num_keys=end, paths=())
        rest = replace(whole, rows=whole.rows[cut:], base=end, num_seen=root_end, paths=paths)
        return [first, rest]


class ExactCalls(NamedTuple):
    """``failures``: kinds of attention that no calls keep exact, in words."""

    calls: CallShapes
    failures: tuple[str, ...]


def exact_calls(needs: AttentionNeeds) -> ExactCalls:
    """What calls keep a row's bits in all layers. Where none do, tiles, and the kinds that they fail."""
    shapes = sorted(set(needs.shapes), key=repr)
    candidates = [
        *(
            bmm_calls(row_multiple=rows, key_multiple=keys, key_chunk=chunk)
            for keys, chunk in ((FREE_KEY_MULTIPLE, 384), (FREE_KEY_MULTIPLE, 256), (256, 256))
            for rows in (1, 2, 4)
        ),
        *(bmm_calls(tile_rows=rows) for rows in (4, 1)),
    ]
    failing: list[KVShape] = []
    for calls in candidates:
        failing = [
            each for each in shapes if not keeps_bits(calls, each, needs.dtype, needs.device)
        ]
        if not failing:
            return ExactCalls(calls, ())
    return ExactCalls(candidates[-1], tuple(_name(each) for each in failing))


def bmm_calls(
    *,
    row_multiple: int = 1,
    tile_rows: int | None = None,
    key_multiple: int = EXACT_KEY_CHUNK,
    key_chunk: int = EXACT_KEY_CHUNK,
) -> CallShapes:
    return CallShapes(False, tile_rows, key_multiple, row_multiple, key_chunk)


def _name(shape: KVShape) -> str:
    kind = f"attention of {shape.num_heads} heads over {shape.num_kv_heads}"
    dims = f", {shape.key_dim} and {shape.value_dim} wide"
    return kind + dims + (", capped" if shape.softcap else "") + (", sinks" * shape.has_sinks)


@torch.inference_mode()
def keeps_bits(calls: CallShapes, shape: KVShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether called so, a row has its bits whatever rows, keys and branches share its call."""
    return _keeps_bits(calls, shape, dtype, device, torch.get_num_threads())


@cache
def _keeps_bits(
    calls: CallShapes, shape: KVShape, dtype: torch.dtype, device: torch.device, num_threads: int
) -> bool:
    del num_threads  # another number of them may divide sums otherwise
    return all(
        torch.equal(got, expected)
        for num_seen in (_FEW, _SOME, _MANY)
        for got, expected in _Probe(calls, shape, dtype, device, num_seen).run()
    )


class _Probe:
    """A few rows that see the same keys, in steps of any shape, through the backend itself.

    Rounding hides most differences in the order of summation, so here sums cancel, and rounding errors
    are all that is left. A query's products with a key cancel in pairs; its scores are these errors,
    scaled up until weights depend on them. The second half of the keys repeats the first, so that weights
    come in pairs too, and the pairs' values cancel.
    """

    def __init__(
        self,
        calls: CallShapes,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        num_seen: int,
    ) -> None:
        generator = torch.Generator().manual_seed(num_seen)

        def drawn(*sizes: int, scale: float) -> torch.Tensor:
            """Of many magnitudes, for sums to be rounded at all: products of bf16 have few bits."""
            exponents = torch.randint(-5, 6, sizes, generator=generator)
            return scale * torch.randn(*sizes, generator=generator) * 2.0**exponents

        self._num_seen, half = num_seen, num_seen // 2
        self._sizes = [size for seen, size in _PROBED_CALLS if seen == num_seen]
        if num_seen == _MANY and shape.num_kv_heads <= MOST_HEADS_APART:
            # More chunks than heads: another kind of call.
            chunks = max(shape.num_kv_heads + 1, 4)
            most = chunks * (calls.key_chunk or 0) + FREE_KEY_MULTIPLE
            self._sizes += [(1, rows, most) for rows in (1, 5, 12)]
        most_keys = max(keys for _, _, keys in self._sizes)
        query = _cancelling(drawn(_DISTINCT_ROWS, shape.num_heads, shape.key_dim, scale=1.0), 1)
        keys = _cancelling(drawn(most_keys, shape.num_kv_heads, shape.key_dim, scale=256.0), -1)
        values = drawn(most_keys, shape.num_kv_heads, shape.value_dim, scale=256.0)
        keys[half : 2 * half] = keys[:half]
        values[half : 2 * half] = -values[:half]
        query, keys, values = (each.to(device, dtype) for each in (query, keys, values))
        self._query = query
        needs = AttentionNeeds("exact", device, dtype, _BLOCK_SIZE, [shape])
        num_blocks = most_keys // _BLOCK_SIZE
        # The text where blocks lie together, where they do not, and with strangers before its end.
        scattered = torch.randperm(num_blocks, generator=generator) + num_blocks
        tree = range(2 * num_blocks, 3 * num_blocks + 1)
        self._tables = (range(num_blocks), scattered.tolist(), tree)
        store = KVStore(num_blocks=tree.stop, device=device, **needs.store_sizes())
        text = range(most_keys)
        in_tree = [*text[: num_seen - 2], text[-1], num_seen - 2, *[num_seen - 1] * _DISTINCT_ROWS]
        for table, order in zip(self._tables, (text, text, in_tree), strict=True):
            slots = [slot_of(table, place, _BLOCK_SIZE) for place in range(len(order))]
            written = torch.tensor(order, device=device)
            store.write(0, torch.tensor(slots, device=device), keys[written], values[written])
        self._backend = _Probed(store, needs, calls)
        sinks = torch.linspace(-1, 1, shape.num_heads, device=device) if shape.has_sinks else None
        share = shape.num_heads // shape.num_kv_heads
        errors = torch.einsum("rhd,khd->rhk", query, keys[:half].repeat_interleave(share, 1))
        spread = (shape.softcap or 2.0) / 4
        # Scaled queries have to be finite, in float16 too, where a kernel makes hardly any errors.
        largest = torch.finfo(dtype).max / (4 * float(query.abs().max()))
        scaling = min(spread / max(float(errors.float().std()), 1e-12), largest)
        self._options = AttentionOptions(scaling, None, shape.softcap, sinks)

    def run(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each call: its rows' outputs, and those of the same rows alone."""
        fewest = min(keys for _, _, keys in self._sizes)
        alone = torch.cat([self._call(1, row, fewest, 0) for row in self._query.split(1)])
        for index, (branches, rows, keys) in enumerate(self._sizes):
            places = torch.arange(branches * rows) % _DISTINCT_ROWS
            yield self._call(branches, self._query[places], keys, index % 2), alone[places]
        for branches, rows in _PROBED_TREES:
            places = torch.arange(branches * rows) % _DISTINCT_ROWS
            yield self._tree(branches, self._query[places]), alone[places]

    def _call(self, branches: int, query: torch.Tensor, num_keys: int, lying: int) -> torch.Tensor:
        rows = query.shape[0] // branches
        table = self._tables[lying][: num_keys // _BLOCK_SIZE]
        plan = self._plan(
            [RequestRows([0] * rows, rows, num_keys - rows, (), table, rows)] * branches
        )
        for group in plan.groups:
            shape = (group.num_branches, group.rows_per_branch, 1, group.num_keys)
            seen = torch.full(shape, math.inf, dtype=query.dtype, device=query.device)
            seen[..., self._num_seen :] = -math.inf
            group.masks[None, False] = Limits(0, seen, [self._num_seen] * group.rows_per_branch)
        return plan.attend(0, query, query, query, self._options)

    def _tree(self, branches: int, query: torch.Tensor) -> torch.Tensor:
        """A known row, a node that is a stranger to all others, one that they hang on, and they."""
        rows = query.shape[0] // branches
        parents = (-1, -1, *[1] * rows)
        count = 1 + len(parents)
        known = self._num_seen - 3
        plan = self._plan(
            [RequestRows([0] * count, 1, known, parents, self._tables[2], count)] * branches
        )
        padded = query.new_zeros(branches, count, *query.shape[1:])
        padded[:, -rows:] = query.view(branches, rows, *query.shape[1:])
        flat = padded.flatten(0, 1)
        output = plan.attend(0, flat, flat, flat, self._options)
        return output.view(branches, count, *output.shape[1:])[:, -rows:].flatten(0, 1)

    def _plan(self, parts: list[RequestRows]) -> SdpaPlan:
        batch = build_batch([replace(part) for part in parts], _BLOCK_SIZE)
        buffers = InputBuffers(self._query.device, batch.num_rows)
        return self._backend.plan(batch, buffers.fill(batch))


class _Probed(ExactAttention):
    """With calls to be probed; leaves the store's keys as they are."""

    def __init__(self, store: KVStore, needs: AttentionNeeds, calls: CallShapes) -> None:
        SdpaAttention.__init__(self, store, needs)
        self.calls, self.failures = calls, ()

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        pass


def _cancelling(values: torch.Tensor, sign: int) -> torch.Tensor:
    """The second half of the last dimension repeats the first, times ``sign``, in reverse."""
    half = values.shape[-1] // 2
    values[..., half : 2 * half] = sign * values[..., :half].flip(-1)
    return values
