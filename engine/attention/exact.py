"""Attention that gives a row the same bits whatever shares its step.

A kernel gives a row the same bits whenever it is called with the same *shapes*; what changes bits is a
different number of rows or keys. And a draft tree that is masked where it lies leaves skipped keys
between a node's ancestors, which changes how a kernel groups its sums. So here a tree is taken apart into
branches, each of which reads its keys in the order of its text, as if that were all there is; and calls
keep to the shapes that a probe at load found to keep bits (``exact_calls``): any, where attention is
written out as products and the probe says that shapes do not matter; else the fused kernel gets its rows
in tiles of a fixed number of rows, and keys padded to multiples of 512, the split of torch's CPU flash
kernel. (Measured on AVX-512 without AMX: 0 of 27,540 rows differed in bf16 and fp32; without tiles
10-90 %.)
"""

from __future__ import annotations

from typing import ClassVar

from engine.attention.backend import AttentionNeeds, attention_backend
from engine.attention.products import bmm_is_faster, products_keep_bits
from engine.attention.sdpa import FREE_KEY_MULTIPLE, Branch, CallShapes, SdpaAttention
from engine.batch import RequestRows, slot_of
from engine.config import Determinism
from kvpool.store import KVStore

EXACT_KEY_MULTIPLE = 512
# Query rows (times the heads that share a key head) of a tile: enough to fill the kernel's registers.
EXACT_TILE_ROWS = 8


@attention_backend("exact")
class ExactAttention(SdpaAttention):
    """Whole draft trees only: one fed level by level would leave its branches apart."""

    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"exact"})

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.calls = exact_calls(needs)

    def branches(self, request: RequestRows) -> list[Branch]:
        return take_apart(request, self.store.block_size)


def exact_calls(needs: AttentionNeeds) -> CallShapes:
    """Where the probe decides: what shapes keep a row's bits, for all layers."""
    kinds = {
        (shape.num_heads // shape.num_kv_heads, shape.key_dim, shape.value_dim)
        for shape in needs.shapes
    }
    if bmm_is_faster(needs.device, needs.dtype) and all(
        products_keep_bits(*kind, FREE_KEY_MULTIPLE, needs.dtype) for kind in sorted(kinds)
    ):
        return CallShapes(fused=False)
    tile_rows = min(exact_tile_rows(each.num_heads, each.num_kv_heads) for each in needs.shapes)
    return exact_tiles(tile_rows)


def exact_tiles(tile_rows: int) -> CallShapes:
    return CallShapes(fused=True, tile_rows=tile_rows, key_multiple=EXACT_KEY_MULTIPLE)


def exact_tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a tile: with the heads that share a key head they fill about ``EXACT_TILE_ROWS`` rows of
    the kernel."""
    return max(1, EXACT_TILE_ROWS // (num_heads // num_kv_heads))


def take_apart(request: RequestRows, block_size: int) -> list[Branch]:
    """The known rows with the nodes that lie as their text does, a chain; then branch after branch, each
    as deep as it goes."""
    if request.num_stored:
        raise ValueError("exact attention takes whole draft trees only")
    parents, table = request.parents, request.block_table
    chain = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
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
