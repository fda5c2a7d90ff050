"""Slots in a file of fixed size, which outlives the process however that ends.

::

    header | table: an entry for each slot | slots | the header once more

A slot is written in three strokes: its entry is cleared, its content is written, and then the entry,
which has checksums of both. So whatever moment a process is killed at, each slot holds a whole block,
or nothing, or what does not fit its checksum, which is nothing, too. A machine that loses power may
lose strokes in any order: the checksums tell.

The header says whose content it is (``identity``). A file of another's, or whose header is damaged at
both ends, is emptied with a word in the log; one that has nothing of ours is refused, as it may be
somebody's. One process uses a file at a time, by a lock that ends with it.

Content is written by a thread, so that no step waits for a disk; where more than ``_MOST_WAITING``
bytes wait, ``is_ready`` says no. Reads are the caller's. When the file can be written no more, it is
still read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from kvpool.tier import Bytes, Entry

logger = logging.getLogger(__name__)

_MAGIC = b"SlipstreamKV\x00\x01\r\n"
_VERSION = 1
_PAGE = 4096
_HEAD = Struct("<16sII")
"""Magic, length and checksum of what follows, in JSON."""
_ENTRY = Struct("<32sQQII4x")
"""Digest, marks, age, length of the content, checksum of the content."""
_SUM = Struct("<I")
"""The checksum of the entry before it and of the slot's number."""
_ENTRY_SIZE = _ENTRY.size + _SUM.size
_NOTHING = bytes(_ENTRY_SIZE)
_MOST_WAITING = 64 << 20
_CLOSE_SECONDS = 10.0


class SlotFileError(ValueError):
    """The file cannot be used, for the reason given."""


def num_slots_for(num_bytes: int, slot_bytes: int) -> int:
    """Returns how many slots a file of ``num_bytes`` has room for, perhaps none."""
    room = num_bytes - 3 * _PAGE  # the table is whole pages, too
    return max(0, room // (_whole_pages(slot_bytes) + _ENTRY_SIZE))


class SlotFile:
    """``kvpool.tier.Slots``. ``identity``: names and values of all that has to be equal for content to
    be of use; texts.

    Raises SlotFileError for a file that is in use, cannot be opened, or is no such file.
    """

    is_lasting = True

    def __init__(
        self, path: Path, num_slots: int, slot_bytes: int, identity: Mapping[str, str]
    ) -> None:
        self.num_slots = num_slots
        self.num_damaged = 0
        self.path = path
        self._slot_size = _whole_pages(slot_bytes)
        self._slots_at = _PAGE + _whole_pages(num_slots * _ENTRY_SIZE)
        self._end = self._slots_at + num_slots * self._slot_size
        self._layout = {
            "version": str(_VERSION),
            "num_slots": str(num_slots),
            "slot_bytes": str(slot_bytes),
            **identity,
        }
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Entry, Bytes]] = {}
        """The newest content that is not in the file yet, by slot."""
        self._num_waiting = 0
        self.is_writable = True
        self._found: list[tuple[int, Entry]] = []
        self._file = _open_locked(path)
        try:
            self._begin()
        except OSError as error:
            os.close(self._file)
            raise SlotFileError(f"{path}: {error.strerror or error}") from error
        except BaseException:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._work, name="kv-offload", daemon=True)
        self._thread.start()

    # Slots

    @property
    def is_ready(self) -> bool:
        return self.is_writable and self._num_waiting < _MOST_WAITING

    def entries(self) -> Iterable[tuple[int, Entry]]:
        return self._found

    def write(self, slot: int, entry: Entry, content: Bytes) -> None:
        with self._lock:
            self._waiting[slot] = entry, content
            self._num_waiting += len(content)
        self._jobs.put(lambda: self._write(slot, entry, content))

    def read(self, slot: int, entry: Entry) -> Bytes | None:
        with self._lock:
            waiting = self._waiting.get(slot)
        if waiting is not None:
            return waiting[1]
        try:
            found = self._parse(slot, os.pread(self._file, _ENTRY_SIZE, self._entry_at(slot)))
            if found is None:
                return None
            there, length, checksum = found
            if (there.digest, there.marks) != (entry.digest, entry.marks):
                return None
            content = np.empty(length, dtype=np.uint8)
            num_read = os.preadv(self._file, [content.data], self._slot_at(slot))
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.path, error)
            return None
        is_whole = num_read == length and zlib.crc32(content.data) == checksum
        return content if is_whole else None

    def close(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Waits some seconds for what is not written yet."""
        self._jobs.put(lambda: self._write_ages(entries))
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s: what was to be written takes too long, and is left", self.path)
        else:
            os.close(self._file)

    # The writing thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:
                if self.is_writable:
                    logger.error(
                        "%s cannot be written any more (%s); what it holds is still read",
                        self.path,
                        error.strerror or error,
                    )
                self.is_writable = False

    def _write(self, slot: int, entry: Entry, content: Bytes) -> None:
        try:
            with self._lock:
                newest = self._waiting.get(slot)
            if newest is None or newest[0] is not entry or not self.is_writable:
                return
            self._put(_NOTHING, self._entry_at(slot))
            self._put(content.data, self._slot_at(slot))
            checksum = zlib.crc32(content.data)
            self._put(_packed(slot, entry, len(content), checksum), self._entry_at(slot))
        finally:
            with self._lock:
                self._num_waiting -= len(content)
                if self._waiting.get(slot, (None,))[0] is entry:
                    del self._waiting[slot]

    def _write_ages(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """So that a next life knows which were used last."""
        table = bytearray(os.pread(self._file, self.num_slots * _ENTRY_SIZE, _PAGE))
        for slot, entry in entries:
            place = slice(slot * _ENTRY_SIZE, (slot + 1) * _ENTRY_SIZE)
            found = self._parse(slot, table[place])
            if found is not None and found[0].digest == entry.digest:
                table[place] = _packed(slot, found[0]._replace(age=entry.age), *found[1:])
        self._put(table, _PAGE)

    def _put(self, content: bytes | bytearray | memoryview, place: int) -> None:
        """Raises OSError unless all of it is written."""
        left = memoryview(content)
        while left:
            count = os.pwrite(self._file, left, place)
            left, place = left[count:], place + count

    # Places

    def _entry_at(self, slot: int) -> int:
        return _PAGE + slot * _ENTRY_SIZE

    def _slot_at(self, slot: int) -> int:
        return self._slots_at + slot * self._slot_size

    @staticmethod
    def _parse(slot: int, packed: bytes | bytearray) -> tuple[Entry, int, int] | None:
        """Returns an entry with length and checksum of its content; None: there is none, or it is
        damaged."""
        if len(packed) != _ENTRY_SIZE or packed != _sealed(slot, packed[: _ENTRY.size]):
            return None
        digest, marks, age, length, checksum = _ENTRY.unpack_from(packed)
        return Entry(digest, marks, age), length, checksum

    # Start

    def _begin(self) -> None:
        """Takes over what an earlier process left, or begins anew."""
        size = os.fstat(self._file).st_size
        reason = self._why_not(size)
        if reason is not None:
            if reason:
                logger.warning("%s is emptied: %s", self.path, reason)
            os.ftruncate(self._file, 0)
            size = 0
        os.ftruncate(self._file, self._end + _PAGE)
        content = json.dumps(self._layout).encode()
        if _HEAD.size + len(content) > _PAGE:
            raise SlotFileError(f"{self.path}: what identifies its content is too long")
        header = (_HEAD.pack(_MAGIC, len(content), zlib.crc32(content)) + content).ljust(
            _PAGE, b"\0"
        )
        for place in (0, self._end):
            self._put(header, place)
        if reason is None:
            self._found = self._read_table(size)

    def _why_not(self, size: int) -> str | None:
        """Returns why the file cannot be taken over; empty: there is nothing in it; None: it can. Raises
        SlotFileError for a file that is not ours."""
        heads = [os.pread(self._file, _PAGE, place) for place in (0, max(0, size - _PAGE))]
        if not any(any(head) for head in heads):
            return ""
        layouts = [layout for head in heads if (layout := _layout(head)) is not None]
        if self._layout in layouts:
            return None
        if layouts:
            # The file's own names stay out of the log: anyone may have written them.
            ours, theirs = self._layout.items(), layouts[0]
            names = [name for name, value in ours if theirs.get(name) != value]
            return f"it was written for something else (other: {', '.join(names) or 'fields'})"
        if any(head[: len(_MAGIC)] == _MAGIC[: len(head)] for head in heads):
            return "its header is damaged"
        raise SlotFileError(f"{self.path} is not a file of KV blocks; name another, or remove it")

    def _read_table(self, size: int) -> list[tuple[int, Entry]]:
        """Returns the blocks that are there. ``size``: of the file as it was found; what was cut off is
        not."""
        table = os.pread(self._file, self.num_slots * _ENTRY_SIZE, _PAGE)
        newest: dict[bytes, tuple[int, Entry]] = {}
        for slot in range(self.num_slots):
            packed = table[slot * _ENTRY_SIZE : (slot + 1) * _ENTRY_SIZE]
            if packed == _NOTHING:
                continue
            found = self._parse(slot, packed)
            if found is None or self._slot_at(slot) + found[1] > size:
                self.num_damaged += 1
                self._put(_NOTHING, self._entry_at(slot))
                continue
            entry = found[0]
            if entry.digest not in newest or newest[entry.digest][1].age < entry.age:
                newest[entry.digest] = slot, entry
        if self.num_damaged:
            logger.warning("%s: %d damaged entries are forgotten", self.path, self.num_damaged)
        logger.info("%s: %d blocks are there from before", self.path, len(newest))
        return list(newest.values())


def _open_locked(path: Path) -> int:
    try:
        # What users wrote can be guessed from it.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SlotFileError(f"{path}: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise SlotFileError(f"{path} is in use by another server") from error
    found = os.fstat(file)
    if found.st_mode & stat.S_IWOTH:
        os.close(file)
        raise SlotFileError(
            f"{path}: everybody may write it, and so what the model reads; remove it"
        )
    if found.st_mode & stat.S_IWGRP or found.st_uid not in (os.geteuid(), 0):
        logger.warning("%s: another user may write it, and so what the model reads", path)
    return file


def _layout(head: bytes) -> dict[str, Any] | None:
    """Returns what a header says, {} where that is no object; None: it is damaged."""
    if len(head) < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(head)
    content = head[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or zlib.crc32(content) != checksum:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _packed(slot: int, entry: Entry, length: int, checksum: int) -> bytes:
    return _sealed(slot, _ENTRY.pack(*entry, length, checksum))


def _sealed(slot: int, entry: bytes | bytearray) -> bytes:
    return bytes(entry) + _SUM.pack(zlib.crc32(entry, slot + 1))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
