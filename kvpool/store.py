"""The tensors behind the block pool: keys and values of every layer, one row per slot.

Pure storage: which slot belongs to whom is the block pool's business. Several stores (a target's, a
small draft model's) may be addressed by the same block ids.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod

import torch

RowShape = tuple[int, int, int] | int
"""``(num_kv_heads, key_dim, value_dim)`` of one layer; or the layer before it whose rows are its own,
too."""


class ZeroedMemory:
    """Tensors that begin as zeros; on a host, memory that costs nothing until it is written."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._tensors: list[torch.Tensor] = []
        self._mapped: list[mmap.mmap] = []

    def clear(self) -> None:
        """Makes everything zeros again, and gives the memory of a host's store back."""
        for mapped in self._mapped:
            mapped.madvise(mmap.MADV_DONTNEED)
        for tensor in self._tensors:
            _copyable(tensor).zero_()

    def _zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, are_rows: bool = False
    ) -> torch.Tensor:
        """Pages straight from the operating system are mapped when touched first. ``are_rows``: small
        ones, since the rows of a block lie in as many places as there are layers and heads, and with huge
        pages a few blocks would take gigabytes."""
        if self.device.type != "cpu":
            self._tensors.append(torch.zeros(shape, dtype=dtype, device=self.device))
            return self._tensors[-1]
        num_bytes = prod(shape) * dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapped.append(mmap.mmap(-1, max(1, num_bytes), flags=flags))
        if are_rows:
            with suppress(OSError):  # a kernel that has no huge pages
                self._mapped[-1].madvise(mmap.MADV_NOHUGEPAGE)
        flat = torch.frombuffer(self._mapped[-1], dtype=torch.uint8)[:num_bytes]
        return flat.view(dtype).view(shape)


class KVStore(ZeroedMemory):
    """Keys and values of the layers with these ``shapes`` in blocks of ``block_size`` slots.

    Raises ValueError on sizes that make no store.

    Heads lie one after another, and of each head all slots: what attention reads, the keys of one head,
    is one piece of memory where blocks lie together. ``key[layer]`` is a view
    ``[num_slots, num_kv_heads, key_dim]``, ``value[layer]`` likewise; ``planes[layer]`` has both with
    heads first, 8-bit floats as bytes. A row takes the memory of a multiple of ``dim_multiple``
    dimensions; those beyond its own are 0 for ever.

    Everything starts as zeros. Attention reads whole blocks, slots never written included, and
    masks them: a masked weight of 0 times a NaN from fresh memory would still be NaN.
    """

    def __init__(
        self,
        shapes: Sequence[RowShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        dim_multiple: int = 1,
    ) -> None:
        rows = _rows(shapes)
        if min(num_blocks, block_size, *map(min, rows)) < 1:
            raise ValueError("blocks, slots, heads and dimensions must be at least 1")
        super().__init__(device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.dtype = dtype
        # Planes (one layer's keys, or its values) whose rows have equal shape share one tensor, so
        # that moving accepted rows takes one copy for all layers and not two per layer.
        planes: dict[int, torch.Tensor] = {}  # each [num_kv_heads, num_slots, head_dim]
        self._stacks: list[torch.Tensor] = []  # [num_planes * heads, num_slots, padded dim]
        for heads, dim in sorted(set(rows)):
            members = [index for index, row in enumerate(rows) if row == (heads, dim)]
            size = (len(members), heads, self.num_slots, _padded(dim, dim_multiple))
            stack = self._zeros(size, dtype, are_rows=True)
            self._stacks.append(_copyable(stack).flatten(0, 1))
            for plane, index in zip(stack, members, strict=True):
                planes[index] = plane[..., :dim]
        # Views made once: making one costs as much as a small copy.
        own = iter([(planes[index], planes[index + 1]) for index in range(0, len(rows), 2)])
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shape in shapes:
            pairs.append(pairs[shape] if isinstance(shape, int) else next(own))
        self.key = [key.transpose(0, 1) for key, _ in pairs]
        self.value = [value.transpose(0, 1) for _, value in pairs]
        self.planes = [(_copyable(key), _copyable(value)) for key, value in pairs]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        return self.num_bytes // self.num_blocks

    @property
    def layout(self) -> str:
        """Describes the bytes of a block in words; blocks may move between stores with equal layouts."""
        sizes = [(stack.shape[0], self.block_size, stack.shape[2]) for stack in self._stacks]
        return f"{self.dtype} {sizes}"

    @property
    def num_bytes(self) -> int:
        return sum(stack.numel() * stack.element_size() for stack in self._stacks)

    @staticmethod
    def bytes_per_block(
        shapes: Sequence[RowShape], block_size: int, dtype: torch.dtype, dim_multiple: int = 1
    ) -> int:
        """Bytes that one more block costs over all layers: for sizing a pool from free memory."""
        per_slot = sum(heads * _padded(dim, dim_multiple) for heads, dim in _rows(shapes))
        return per_slot * block_size * dtype.itemsize

    def read_block(
        self,
        block_id: int,
        out: torch.Tensor,  # [bytes of a block] uint8, on the host
    ) -> None:
        """Copies all rows of a block, of all layers, padding included."""
        for rows, part in self._parts_of(block_id, out):
            part.copy_(rows)

    def write_block(self, block_id: int, content: torch.Tensor) -> None:
        """Puts back what ``read_block`` has copied, into any block."""
        for rows, part in self._parts_of(block_id, content):
            rows.copy_(part)

    def _parts_of(
        self, block_id: int, content: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields a block's rows of each tensor, and their place in its bytes as a view of equal shape."""
        slots, start = slice(block_id * self.block_size, (block_id + 1) * self.block_size), 0
        for stack in self._stacks:
            rows = stack[:, slots]
            end = start + rows.numel() * rows.element_size()
            yield rows, content[start:end].view(rows.dtype).view(rows.shape)
            start = end

    def write(
        self,
        layer: int,
        slots: torch.Tensor,  # [num_rows] int64, no slot twice
        key: torch.Tensor,  # [num_rows, num_kv_heads, key_dim]
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
    ) -> None:
        """Put one layer's new rows into their slots; other dtypes are converted to the store's."""
        for plane, rows in zip(self.planes[layer], (key, value), strict=True):
            if self.dtype.itemsize == 1:
                # Out of an 8-bit float's range is NaN, and one NaN would spoil every later row.
                most = torch.finfo(self.dtype).max
                rows = rows.clamp(-most, most)
            plane.index_copy_(1, slots, _copyable(rows.to(self.dtype)).transpose(0, 1))

    def gather(
        self,
        layer: int,
        slots: torch.Tensor,  # [num_ids] int64, repeats allowed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of slots' keys ``[num_kv_heads, num_ids, key_dim]``, and values likewise."""
        keys, values = (each.index_select(1, slots) for each in self.planes[layer])
        return keys.view(self.dtype), values.view(self.dtype)

    def move(
        self,
        src_slots: torch.Tensor,  # [num_moves] int64
        dst_slots: torch.Tensor,  # [num_moves] int64, no slot twice
    ) -> None:
        """Copy rows between slots in every layer, keys and values.

        All sources are read before any destination is written, so the two may overlap. Serves
        to compact accepted tree paths: keys carry their position already, so copying is enough.
        """
        for stack in self._stacks:
            stack.index_copy_(1, dst_slots, stack.index_select(1, src_slots))


def _rows(shapes: Sequence[RowShape]) -> list[tuple[int, int]]:
    """Heads and dimensions of a row of each layer's keys, then of its values, if they are its own."""
    own = (shape for shape in shapes if not isinstance(shape, int))
    return [(heads, dim) for heads, *dims in own for dim in dims]


def _padded(dim: int, multiple: int) -> int:
    return -(-dim // multiple) * multiple


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that indexing knows: 8-bit floats are moved as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
