"""The tensors behind the block pool: keys and values of every layer, one row per slot.

Pure storage: which slot belongs to whom is the block pool's business. Several stores (a target's, a
small draft model's) may be addressed by the same block ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; a cache line, and what vector kernels like best."""


class KVStore:
    """Keys and values of ``num_layers`` layers in blocks of ``block_size`` slots.

    ``num_kv_heads``, ``head_dim_k`` and ``head_dim_v`` are one number for all layers or one per
    layer. Raises ValueError on sizes that make no store.

    Heads lie one after another, and of each head all slots: what attention reads, the keys of one head,
    is one piece of memory where blocks lie together, and gathered blocks need no further copy.
    ``key[layer]`` is a view ``[num_slots, num_kv_heads, head_dim_k]``, ``value[layer]`` likewise.

    Everything starts as zeros. Attention reads whole blocks, slots never written included, and
    masks them: a masked weight of 0 times a NaN from fresh memory would still be NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_dim_k: int | Sequence[int],
        head_dim_v: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if min(num_layers, num_blocks, block_size) < 1:
            raise ValueError("num_layers, num_blocks and block_size must be at least 1")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.dtype = dtype
        self.device = torch.device(device)
        shapes_k, shapes_v = _row_shapes(num_layers, num_kv_heads, head_dim_k, head_dim_v)
        # Planes (one layer's keys, or its values) whose rows have equal shape share one tensor, so
        # that moving accepted rows takes one copy for all layers and not two per layer.
        shapes = shapes_k + shapes_v
        planes: list[torch.Tensor | None] = [None] * len(shapes)
        self._stacks: list[torch.Tensor] = []  # [num_planes * heads, num_slots, dim]
        for shape in sorted(set(shapes)):
            heads, dim = shape
            members = [index for index, other in enumerate(shapes) if other == shape]
            stack = _zeros((len(members), heads, self.num_slots, dim), dtype, self.device)
            self._stacks.append(_copyable(stack).flatten(0, 1))
            for plane, index in zip(stack, members, strict=True):
                planes[index] = plane
        stored = [plane for plane in planes if plane is not None]
        self._keys = stored[:num_layers]  # each [num_kv_heads, num_slots, head_dim_k]
        self._values = stored[num_layers:]  # each [num_kv_heads, num_slots, head_dim_v]
        self.key = [plane.transpose(0, 1) for plane in self._keys]
        self.value = [plane.transpose(0, 1) for plane in self._values]
        # Views made once: making one costs as much as a small copy.
        pairs = zip(self._keys, self._values, strict=True)
        self._planes = [(_copyable(key), _copyable(value)) for key, value in pairs]
        self._blocks = [
            (self._in_blocks(key), self._in_blocks(value)) for key, value in self._planes
        ]

    @property
    def num_bytes(self) -> int:
        return sum(stack.numel() * stack.element_size() for stack in self._stacks)

    @staticmethod
    def bytes_per_block(
        num_layers: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_dim_k: int | Sequence[int],
        head_dim_v: int | Sequence[int],
        dtype: torch.dtype,
    ) -> int:
        """Bytes that one more block costs over all layers: for sizing a pool from free memory."""
        shapes_k, shapes_v = _row_shapes(num_layers, num_kv_heads, head_dim_k, head_dim_v)
        return sum(heads * dim for heads, dim in shapes_k + shapes_v) * block_size * dtype.itemsize

    def write(
        self,
        layer: int,
        slots: torch.Tensor,  # [num_rows] int64, no slot twice
        key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim_k]
        value: torch.Tensor,  # [num_rows, num_kv_heads, head_dim_v]
    ) -> None:
        """Put one layer's new rows into their slots; other dtypes are converted to the store's."""
        for plane, rows in zip(self._planes[layer], (key, value), strict=True):
            plane.index_copy_(1, slots, _copyable(self._converted(rows)).transpose(0, 1))

    def _converted(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dtype.itemsize == 1 and self.dtype.is_floating_point:
            # Out of an 8-bit float's range is NaN, and one NaN would spoil every later row.
            most = torch.finfo(self.dtype).max
            rows = rows.clamp(-most, most)
        return rows.to(self.dtype)

    def key_shape(self, layer: int) -> torch.Size:
        """``[num_kv_heads, num_slots, head_dim_k]``; ``value_shape`` likewise."""
        return self._keys[layer].shape

    def value_shape(self, layer: int) -> torch.Size:
        return self._values[layer].shape

    def rows_of(self, block_ids: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Rows of blocks in a layer of so many heads, of each head in turn: what ``gather_blocks``
        takes, for a caller to make once for many layers. ``[num_kv_heads * num_ids]`` int64."""
        return _of_each_head(block_ids, self.num_blocks, num_kv_heads)

    def slot_rows_of(self, slots: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """The same of single slots, for ``gather_values``."""
        return _of_each_head(slots, self.num_slots, num_kv_heads)

    def gather_blocks(
        self,
        layer: int,
        rows: torch.Tensor,  # of rows_of, repeats allowed
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of whole blocks, in the given order.

        Returns keys ``[num_kv_heads, num_ids * block_size, head_dim_k]`` and values likewise. ``out``:
        contiguous memory of that size and of the store's type to copy into.
        """
        heads = self._keys[layer].shape[0]
        gathered = []
        for index, blocks in enumerate(self._blocks[layer]):
            if out is None:
                copied = blocks.index_select(0, rows)
            else:
                copied = _copyable(out[index]).view(rows.shape[0], -1)
                torch.index_select(blocks, 0, rows, out=copied)
            dim = blocks.shape[1] // self.block_size
            gathered.append(copied.view(self.dtype).view(heads, -1, dim))
        return gathered[0], gathered[1]

    def gather_values(
        self,
        layer: int,
        rows: torch.Tensor,  # of slot_rows_of, repeats allowed
    ) -> torch.Tensor:
        """Copies of single slots' values, ``[num_kv_heads, num_ids, head_dim_v]``."""
        plane = self._planes[layer][1]
        gathered = plane.flatten(0, 1).index_select(0, rows)
        return gathered.view(self.dtype).view(plane.shape[0], -1, plane.shape[2])

    def slice_blocks(
        self, layer: int, first_block: int, num_blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of consecutive blocks, shaped like ``gather_blocks``: no copy, so read only."""
        first, count = first_block * self.block_size, num_blocks * self.block_size
        return (
            self._keys[layer].narrow(1, first, count),
            self._values[layer].narrow(1, first, count),
        )

    def move(
        self,
        src_slots: torch.Tensor,  # [num_moves] int64
        dst_slots: torch.Tensor,  # [num_moves] int64, no slot twice
    ) -> None:
        """Copy rows between slots in every layer, keys and values.

        All sources are read before any destination is written, so the two may overlap. Serves
        to compact accepted tree paths: keys carry their position already, so copying is enough.
        """
        if src_slots.numel() == 0:
            return
        for stack in self._stacks:
            stack.index_copy_(1, dst_slots, stack.index_select(1, src_slots))

    def _in_blocks(self, plane: torch.Tensor) -> torch.Tensor:
        """``[num_kv_heads * num_blocks, block_size * dim]``."""
        return plane.view(-1, self.block_size * plane.shape[2])


def _of_each_head(ids: torch.Tensor, num_ids: int, num_kv_heads: int) -> torch.Tensor:
    heads = torch.arange(num_kv_heads, device=ids.device)
    return (heads.mul_(num_ids)[:, None] + ids).flatten()


def _row_shapes(
    num_layers: int,
    num_kv_heads: int | Sequence[int],
    head_dim_k: int | Sequence[int],
    head_dim_v: int | Sequence[int],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(heads, dim) of a row of keys and of a row of values, per layer."""
    heads = _per_layer("num_kv_heads", num_kv_heads, num_layers)
    dims_k = _per_layer("head_dim_k", head_dim_k, num_layers)
    dims_v = _per_layer("head_dim_v", head_dim_v, num_layers)
    return list(zip(heads, dims_k, strict=True)), list(zip(heads, dims_v, strict=True))


def _per_layer(name: str, sizes: int | Sequence[int], num_layers: int) -> list[int]:
    listed = [sizes] * num_layers if isinstance(sizes, int) else list(sizes)
    if len(listed) != num_layers or min(listed) < 1:
        raise ValueError(f"{name} must be positive, one for all or one for each of {num_layers}")
    return listed


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that indexing knows: 8-bit floats are moved as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU, memory that costs nothing until it is written.

    ``torch.zeros`` writes every byte at once, so that a generous pool would take its full size from
    the machine at start. Zeroed memory straight from the operating system (what ``numpy.zeros``
    asks for) is mapped when touched first.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
