"""The second tier of the prefix cache: blocks that outlive their place in memory, by their digests.

Bookkeeping: which block lies in which slot, and which goes when there is none left, the least recently
used. What slots are is ``Slots``, which keep bytes; what a block's bytes are is ``BlockBytes``. Called by
the block pool, on the engine's thread. A hit needs no comparison, as in the prefix cache: digests stand
for salt and tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
_BYTES_PER_STEP = 8 << 20
"""The most bytes that a step may restore: a few milliseconds, so that other requests' tokens do not
wait."""


class Entry(NamedTuple):
    """A slot's content: a block's digest, which ``marks`` its bytes have (``BlockBytes``), and a number
    that says how recently it was used."""

    digest: bytes
    marks: int
    age: int


class BlockBytes(Protocol):
    """A block's content in the stores, as bytes. The state behind a block is kept in the same way, in a
    tier of its own: there ``block_id`` is the number of a slot for states."""

    num_bytes: int
    """At most so many."""

    def marks(self, block_id: int, digest: bytes) -> int:
        """Returns which rows beside the target's are there, of the text that ``digest`` names; bits."""

    def read(self, block_id: int, digest: bytes, marks: int) -> Bytes:
        """Returns a copy of the block with those rows."""

    def write(self, block_id: int, digest: bytes, marks: int, content: Bytes) -> None:
        """Puts back what ``read`` returned, into any block."""


class Slots(Protocol):
    """Places for blocks' bytes, from number 0 on."""

    num_slots: int
    num_damaged: int
    """Slots of an earlier life whose entries say nothing any more."""
    is_writable: bool
    """Whether blocks may be written, now or later."""
    is_lasting: bool
    """Whether there is a next life, so that it is of use to write blocks before they are evicted."""

    @property
    def is_ready(self) -> bool:
        """Whether a block may be written now; else it is lost, or waits with its owner."""

    def entries(self) -> Iterable[tuple[int, Entry]]:
        """Entries left in the slots by an earlier process."""

    def write(self, slot: int, entry: Entry, content: Bytes) -> None:
        """Keeps ``content``, which is the slot's from then on. Not to be called unless ``is_ready``."""

    def read(self, slot: int, entry: Entry) -> Bytes | None:
        """Returns what was written there with that digest and those marks; None: it is damaged."""

    def close(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Keeps these for a next life, if there is one. Nothing is called afterwards."""


class BlockTier:
    """``num_restored``, ``num_damaged`` and ``num_dropped`` count blocks that were brought back, were
    found damaged, and found no place; they only grow."""

    def __init__(self, content: BlockBytes, slots: Slots) -> None:
        self.num_restored = 0
        self.num_damaged = slots.num_damaged
        self.num_dropped = 0
        self.blocks_per_step = max(1, _BYTES_PER_STEP // content.num_bytes)
        self._content = content
        self.slots = slots
        self._age = 0
        self._held: OrderedDict[bytes, tuple[int, Entry]] = OrderedDict()
        """Entries by digest, the least recently used first."""
        for slot, entry in sorted(slots.entries(), key=lambda each: each[1].age):
            self._held[entry.digest] = slot, entry
            self._held.move_to_end(entry.digest)
            self._age = entry.age
        used = {slot for slot, _ in self._held.values()}
        self._free = [slot for slot in range(slots.num_slots - 1, -1, -1) if slot not in used]

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    @property
    def num_bytes(self) -> int:
        return len(self._held) * self._content.num_bytes

    def keep(self, digest: bytes, block_id: int) -> None:
        """Copies a published block, unless it is here with all its rows. It may be overwritten then."""
        marks = self._content.marks(block_id, digest)
        slot, entry = self._held.get(digest, (-1, None))
        if entry is not None and marks | entry.marks == entry.marks:
            self.touch(digest)
            return
        if not self.slots.is_ready:
            self.num_dropped += 1
            return
        content = self._content.read(block_id, digest, marks)
        if entry is None:
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1][0]
        self._age += 1
        entry = Entry(digest, marks, self._age)
        self._held[digest] = slot, entry
        self._held.move_to_end(digest)
        self.slots.write(slot, entry, content)

    def restore(self, digest: bytes, block_id: int) -> bool:
        """Copies a block that is here into one of the stores. False: it is damaged, and gone."""
        slot, entry = self._held[digest]
        content = self.slots.read(slot, entry)
        if content is None:
            del self._held[digest]
            self._free.append(slot)
            self.num_damaged += 1
            logger.warning("a block of the KV offload is damaged and forgotten: slot %d", slot)
            return False
        self._content.write(block_id, digest, entry.marks, content)
        self.num_restored += 1
        return True

    def touch(self, digest: bytes) -> None:
        """A block that may be here was of use."""
        if digest in self._held:
            self._held.move_to_end(digest)

    def close(self) -> None:
        """Keeps for a next life what there is, if the slots have one."""
        held = enumerate(self._held.values(), start=1)
        self.slots.close([(slot, entry._replace(age=age)) for age, (slot, entry) in held])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or holds one block."""
        slots = sorted([*self._free, *(slot for slot, _ in self._held.values())])
        if slots != list(range(self.slots.num_slots)):
            raise AssertionError("offload: a slot is in two states, or in none")
        wrong = [digest for digest, (_, entry) in self._held.items() if entry.digest != digest]
        if wrong:
            raise AssertionError("offload: an entry has another block's name")


class MemorySlots:
    """Slots in the host's memory: for a device that has less of it. Memory is taken when it is used."""

    is_ready = is_writable = True
    is_lasting = False
    num_damaged = 0

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        # What the operating system hands out zeroed is mapped when touched first.
        self._memory = np.zeros((num_slots, slot_bytes), dtype=np.uint8)
        self._sizes = [0] * num_slots

    def entries(self) -> Iterable[tuple[int, Entry]]:
        return ()

    def write(self, slot: int, entry: Entry, content: Bytes) -> None:
        del entry
        self._memory[slot, : len(content)] = content
        self._sizes[slot] = len(content)

    def read(self, slot: int, entry: Entry) -> Bytes | None:
        del entry
        found: Any = self._memory[slot, : self._sizes[slot]]
        return found  # type: ignore[no-any-return]

    def close(self, entries: Iterable[tuple[int, Entry]]) -> None:
        pass
