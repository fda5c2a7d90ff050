"""Attention that gives a row the same bits whatever shares its step.

What changes a row's bits is the shape of a call: another number of rows or keys may select another order
of summation, and in some kernels a row's place among the others does. And a draft tree that is masked
where it lies leaves skipped keys between a node's ancestors, which changes how a kernel groups its sums.
So here a tree is taken apart into branches, each of which reads its keys in the order of its text, as if
that were all there is; and calls keep to shapes that a probe at load found to keep bits.

The candidates, cheapest first. Attention written out as products, with values summed over 384 or 256
keys at a time, so that sums have one length (the last of them less, if that changes nothing): over rows
as they come, padded to a multiple of 1, 2 or 4 (a few rows have kernels of their own), then in tiles of 4
rows and of 1. Last the fused kernel in tiles, and keys padded to multiples of 512, the split of torch's
CPU flash kernel. Measured: with AVX-512 and with AMX the first kind holds in fp32, fp16 and bf16; MKL's
fp32 products with AVX2 need tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import ClassVar, NamedTuple

import torch

from drafters.tree import chain_length
from engine.attention.backend import AttentionNeeds, AttentionOptions, KVShape, attention_backend
from engine.attention.products import FREE_KEY_MULTIPLE, CallShapes
from engine.attention.sdpa import Branch, SdpaAttention
from engine.batch import InputBuffers, RequestRows, build_batch, slot_of
from engine.config import Determinism
from kvpool.store import KVStore

EXACT_KEY_MULTIPLE = 512
EXACT_KEY_CHUNK = 256
# Query rows (times the heads that share a key head) of a tile: enough to fill the kernel's registers.
EXACT_TILE_ROWS = 8

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
        return take_apart(request, self.store.block_size)


class ExactCalls(NamedTuple):
    """``failures``: kinds of attention that no calls keep exact, in words."""

    calls: CallShapes
    failures: tuple[str, ...]


def exact_calls(needs: AttentionNeeds) -> ExactCalls:
    """What calls keep a row's bits in all layers. Where none do, tiles, and the kinds that they fail."""
    shapes = sorted(set(needs.shapes), key=repr)
    tile_rows = min(exact_tile_rows(each.num_heads, each.num_kv_heads) for each in shapes)
    candidates = [
        *(
            bmm_calls(row_multiple=rows, key_multiple=keys, key_chunk=chunk)
            for keys, chunk in ((FREE_KEY_MULTIPLE, 384), (FREE_KEY_MULTIPLE, 256), (256, 256))
            for rows in (1, 2, 4)
        ),
        *(bmm_calls(tile_rows=rows) for rows in (4, 1)),
        fused_tiles(tile_rows),
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


def fused_tiles(tile_rows: int) -> CallShapes:
    return CallShapes(fused=True, tile_rows=tile_rows, key_multiple=EXACT_KEY_MULTIPLE)


def exact_tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a tile: with the heads that share a key head they fill about ``EXACT_TILE_ROWS`` rows of
    the kernel."""
    return max(1, EXACT_TILE_ROWS // (num_heads // num_kv_heads))


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
        most_keys = max(keys for _, _, keys in self._sizes)
        query = _cancelling(drawn(_DISTINCT_ROWS, shape.num_heads, shape.key_dim, scale=1.0), 1)
        keys = _cancelling(drawn(most_keys, shape.num_kv_heads, shape.key_dim, scale=1.0), -1)
        values = drawn(most_keys, shape.num_kv_heads, shape.value_dim, scale=256.0)
        keys[half : 2 * half] = keys[:half]
        values[half : 2 * half] = -values[:half]
        query, keys, values = (each.to(device, dtype) for each in (query, keys, values))
        self._query = query
        needs = AttentionNeeds("exact", device, dtype, _BLOCK_SIZE, [shape])
        store = KVStore(num_blocks=most_keys // _BLOCK_SIZE, device=device, **needs.store_sizes())
        store.write(0, torch.arange(most_keys, device=device), keys, values)
        self._backend = _Probed(store, needs)
        self._backend.calls = calls
        sinks = torch.linspace(-1, 1, shape.num_heads, device=device) if shape.has_sinks else None
        share = shape.num_heads // shape.num_kv_heads
        errors = torch.einsum("rhd,khd->rhk", query, keys[:half].repeat_interleave(share, 1))
        scaling = (shape.softcap or 2.0) / max(float(errors.float().std()), 1e-12)
        self._options = AttentionOptions(scaling, None, shape.softcap, sinks)

    def run(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each call: its rows' outputs, and those of the same rows alone."""
        fewest = min(keys for _, _, keys in self._sizes)
        alone = torch.cat([self._call(1, row, fewest) for row in self._query.split(1)])
        for branches, rows, keys in self._sizes:
            places = torch.arange(branches * rows) % _DISTINCT_ROWS
            yield self._call(branches, self._query[places], keys), alone[places]

    def _call(self, branches: int, query: torch.Tensor, num_keys: int) -> torch.Tensor:
        rows = query.shape[0] // branches
        table = range(num_keys // _BLOCK_SIZE)
        parts = [
            RequestRows([0] * rows, rows, num_keys - rows, (), table, rows) for _ in range(branches)
        ]
        batch = build_batch(parts, _BLOCK_SIZE)
        plan = self._backend.plan(batch, InputBuffers(query.device, batch.num_rows).fill(batch))
        for group in plan.groups:
            group.visible[:] = False
            group.visible[:, :, : self._num_seen] = True
        return plan.attend(0, query, query, query, self._options)


class _Probed(SdpaAttention):
    """Leaves the store's keys as they are."""

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        pass


def _cancelling(values: torch.Tensor, sign: int) -> torch.Tensor:
    """The second half of the last dimension repeats the first, times ``sign``, in reverse."""
    half = values.shape[-1] // 2
    values[..., half : 2 * half] = sign * values[..., :half].flip(-1)
    return values


def take_apart(request: RequestRows, block_size: int) -> list[Branch]:
    """The known rows with the nodes that lie as their text does, a chain; then branch after branch, each
    as deep as it goes."""
    if request.num_stored:
        raise ValueError("exact attention takes whole draft trees only")
    parents, table = request.parents, request.block_table
    chain = chain_length(parents)
    first_node = request.first_row + request.num_known
    branches = [Branch(range(request.first_row, first_node + chain), request.base, table)]
    root_end = request.base + request.num_known  # the first node's slot
    placed = set(range(chain))
    for start in range(chain, len(parents)):
        if start in placed:
            continue
        branch = [start]
        for node in range(start + 1, len(parents)):
            if parents[node] == branch[-1] and node not in placed:
                branch.append(node)
        placed.update(branch)
        path = branch[:]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        branches.append(
            Branch(
                rows=[first_node + node for node in branch],
                base=root_end + len(path) - len(branch),
                block_table=table,
                path_slots=[slot_of(table, root_end + node, block_size) for node in path],
            )
        )
    return branches
