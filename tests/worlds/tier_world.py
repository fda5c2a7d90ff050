"""Slots and bytes of blocks for pools without tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvpool.tier import Bytes, Entry


class ModelBytes:
    """A block's content in a dictionary by slot: of the pool's blocks, not of the tier's. What is
    copied is remembered by a number, which is the bytes."""

    num_bytes = 8

    def __init__(self, contents: dict[int, Any], block_size: int) -> None:
        self.contents = contents
        self.extra: dict[int, tuple[bytes, int]] = {}
        """The marks that a block has for a digest, by block."""
        self._block_size = block_size
        self._copies: list[list[Any]] = []

    def _slots(self, block_id: int) -> range:
        return range(block_id * self._block_size, (block_id + 1) * self._block_size)

    def marks(self, block_id: int, digest: bytes) -> int:
        name, marks = self.extra.get(block_id, (b"", 0))
        return marks if name == digest else 0

    def read(self, block_id: int, digest: bytes, marks: int) -> Bytes:
        assert marks == self.marks(block_id, digest)
        self._copies.append([self.contents[slot] for slot in self._slots(block_id)])
        return np.array([len(self._copies) - 1], dtype=np.int64).view(np.uint8)

    def write(self, block_id: int, digest: bytes, marks: int, content: Bytes) -> None:
        copy = self._copies[int(content.view(np.int64)[0])]
        self.contents.update(zip(self._slots(block_id), copy, strict=True))
        if marks:
            self.extra[block_id] = digest, marks


class ModelSlots:
    """Slots that outlive their tier, and that a test may damage or keep busy."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_damaged = 0
        self.is_ready = self.is_writable = self.is_lasting = True
        self.found: dict[int, tuple[Entry, Bytes]] = {}
        self.damaged: set[int] = set()

    def entries(self) -> Iterable[tuple[int, Entry]]:
        return [(slot, entry) for slot, (entry, _) in self.found.items()]

    def write(self, slot: int, entry: Entry, content: Bytes) -> None:
        assert self.is_ready
        assert self.is_writable
        self.found[slot] = entry, content
        self.damaged.discard(slot)

    def read(self, slot: int, entry: Entry) -> Bytes | None:
        there, content = self.found[slot]
        assert there.digest == entry.digest
        return None if slot in self.damaged else content

    def close(self, entries: Iterable[tuple[int, Entry]]) -> None:
        kept = dict(entries)
        self.found = {slot: (kept[slot], self.found[slot][1]) for slot in kept}
