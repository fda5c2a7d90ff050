"""A file of blocks is found warm, whatever ended its process; what is damaged in it is nothing, and not
more than that."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvpool.slot_file import _HEAD, _MAGIC, SlotFile, SlotFileError, num_slots_for
from kvpool.tier import Bytes, Entry

NUM_SLOTS, SLOT_BYTES = 8, 5000
OWN = {"weights": "one", "dtype": "float32"}
PAGE = 4096


def name(text: object) -> bytes:
    return hashlib.sha256(str(text).encode()).digest()


def content(seed: int, size: int = SLOT_BYTES) -> Bytes:
    return np.frombuffer(random.Random(seed).randbytes(size), dtype=np.uint8)


def entry(seed: int, age: int = 0) -> Entry:
    return Entry(name(seed), 3, age or seed + 1)


def opened(path: Path, num_slots: int = NUM_SLOTS, **identity: str) -> SlotFile:
    return SlotFile(path, num_slots, SLOT_BYTES, OWN | identity)


@contextmanager
def using(path: Path, **identity: str) -> Iterator[SlotFile]:
    file = opened(path, **identity)
    yield file
    file.close(file.entries())


def fill(path: Path, num: int = NUM_SLOTS) -> None:
    """Leaves block ``seed`` in slot ``seed``."""
    file = opened(path)
    for seed in range(num):
        file.write(seed, entry(seed), content(seed))
    file.close([(seed, entry(seed)) for seed in range(num)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def filled(path: Path) -> Path:
    fill(path)
    return path


def seeds_in(file: SlotFile) -> list[int]:
    """Those whose whole content is there."""
    found = []
    for slot, each in file.entries():
        seed = next(seed for seed in range(100) if name(seed) == each.digest)
        kept = file.read(slot, each)
        if kept is not None:
            assert bytes(kept) == bytes(content(seed, len(kept)))
            found.append(seed)
    return sorted(found)


def spoil(path: Path, place: int, num: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        there = file.read(num)
        file.seek(place)
        file.write(bytes(each ^ 0x55 for each in there))


def test_what_was_written_is_found_by_the_next_process(path: Path) -> None:
    file = opened(path)
    assert not list(file.entries())
    for seed in range(3):
        file.write(2 * seed, entry(seed), content(seed, 100 + seed))
    file.close([(2 * seed, entry(seed, age=9 - seed)) for seed in range(3)])
    with using(path) as file:
        assert seeds_in(file) == [0, 1, 2]
        assert {slot: each.age for slot, each in file.entries()} == {0: 9, 2: 8, 4: 7}
    assert path.stat().st_mode & 0o077 == 0, "others may read what users wrote"


def test_what_waits_to_be_written_can_be_read_and_overwritten(tmp_path: Path) -> None:
    file = opened(tmp_path / "kv")
    for seed in range(50):
        file.write(3, entry(seed), content(seed))
        kept = file.read(3, entry(seed))
        assert kept is not None
        assert bytes(kept) == bytes(content(seed))
    file.close([(3, entry(49))])
    with using(tmp_path / "kv") as file:
        assert seeds_in(file) == [49]


def test_a_slot_with_another_block_is_not_read_for_this_one(tmp_path: Path) -> None:
    fill(tmp_path / "kv")
    with using(tmp_path / "kv") as file:
        assert file.read(1, entry(2)) is None
        assert file.read(1, entry(1)._replace(marks=1)) is None


def test_it_is_as_large_as_it_may_be_and_not_larger(tmp_path: Path) -> None:
    most = 1_000_000
    num_slots = num_slots_for(most, SLOT_BYTES)
    assert num_slots > most // 10_000
    file = opened(tmp_path / "kv", num_slots)
    for slot in range(num_slots):
        file.write(slot, entry(slot), content(slot))
    file.close([])
    assert most - 3 * PAGE - 2 * SLOT_BYTES < (tmp_path / "kv").stat().st_size <= most
    assert num_slots_for(100, SLOT_BYTES) == 0


# --- damage ---


def test_a_damaged_block_alone_is_lost(filled: Path) -> None:
    spoil(filled, 2 * PAGE + 3 * 2 * PAGE + 17)
    with using(filled) as file:
        assert file.num_damaged == 0
        assert seeds_in(file) == [0, 1, 2, 4, 5, 6, 7]


def test_damaged_entries_are_dropped_and_counted_once(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(filled, PAGE + 64 * 2 + 5, 64 * 3)
    with using(filled) as file:
        assert seeds_in(file) == [0, 1, 6, 7]
        assert file.num_damaged == 4
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_an_entry_in_another_slots_place_is_damaged(filled: Path) -> None:
    with filled.open("r+b") as file:
        file.seek(PAGE)
        first = file.read(64)
        file.seek(PAGE + 64)
        file.write(first)
    with using(filled) as file:
        assert seeds_in(file) == [0, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("place", [0, 20, 100], ids=["magic", "checksum", "content"])
def test_a_header_damaged_at_one_end_is_there_at_the_other(filled: Path, place: int) -> None:
    spoil(filled, place)
    with using(filled) as file:
        assert len(seeds_in(file)) == NUM_SLOTS
    spoil(filled, filled.stat().st_size - PAGE + place)
    with using(filled) as file:
        assert len(seeds_in(file)) == NUM_SLOTS


def test_damaged_at_both_ends_it_is_emptied_with_one_line(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place in (20, filled.stat().st_size - PAGE + 20):
        spoil(filled, place)
    with using(filled) as file:
        assert seeds_in(file) == []
        file.write(0, entry(0), content(0))
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == [
        f"{filled} is emptied: its header is damaged"
    ]


@pytest.mark.parametrize("kept", [0, 10, 100, PAGE, PAGE + 70, 2 * PAGE, 5 * PAGE, 10 * PAGE])
def test_a_truncated_file_keeps_what_is_whole(filled: Path, kept: int) -> None:
    os.truncate(filled, kept)
    with using(filled) as file:
        whole = max(0, kept - 2 * PAGE) // (2 * PAGE)
        # A last slot may be whole although its last page is not.
        assert len(seeds_in(file)) in (whole, whole + 1)
        seeds = seeds_in(file)
    with using(filled) as file:
        assert file.num_damaged == 0, "what was found damaged is found again"
        assert seeds_in(file) == seeds


def test_random_damage_is_never_taken_for_content(path: Path) -> None:
    rng = random.Random(3)
    for _ in range(60):
        path.unlink(missing_ok=True)
        fill(path)
        for _ in range(rng.randrange(1, 6)):
            spoil(path, rng.randrange(path.stat().st_size), rng.choice([1, 7, 500, 5000]))
        with suppress(SlotFileError), using(path) as file:  # refused if both ends are gone
            seeds_in(file)


# --- whose it is ---


@pytest.mark.parametrize(
    ("change", "named"),
    [({"weights": "other"}, "weights"), ({"more": "x"}, "fields"), ({"dtype": "bf16"}, "dtype")],
)
def test_another_ones_file_is_emptied_with_a_word(
    filled: Path, change: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with using(filled, **change) as file:
        assert seeds_in(file) == []
    with using(filled) as file:
        assert seeds_in(file) == []
    assert f"it was written for something else (other: {named})" in caplog.text


@pytest.mark.parametrize("said", [b"[]", b"1", b"[" * 4000, b"\xff", b"{", b'{"a\\nb": [1]}', b""])
def test_a_header_that_says_nothing_of_ours_is_another_ones(
    filled: Path, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    head = _HEAD.pack(_MAGIC, len(said), zlib.crc32(said)) + said
    whole = filled.read_bytes()
    filled.write_bytes(head + whole[len(head) : -PAGE] + head.ljust(PAGE, b"x"))
    with using(filled) as found:
        assert seeds_in(found) == []
    (told,) = (each.message for each in caplog.records if each.levelno >= logging.WARNING)
    assert told.startswith(
        f"{filled} is emptied: it was written for something else (other: version"
    )
    assert "\n" not in told


def test_a_file_that_others_may_write_is_refused_or_told(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled.chmod(0o606)
    with pytest.raises(SlotFileError, match="everybody may write it"):
        opened(filled)
    filled.chmod(0o660)
    opened(filled, NUM_SLOTS + 1).close([])
    assert "another user may write it" in caplog.text
    assert "is emptied: it was written for something else (other: num_slots)" in caplog.text


def test_somebody_elses_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("a" * 20_000)
    with pytest.raises(SlotFileError, match="is not a file of KV blocks"):
        opened(path)
    assert path.read_text() == "a" * 20_000
    with pytest.raises(SlotFileError, match="No such file"):
        opened(tmp_path / "missing" / "kv")
    with pytest.raises(SlotFileError, match="directory"):
        opened(tmp_path)


def test_two_do_not_use_one_file(tmp_path: Path) -> None:
    with using(tmp_path / "kv"):
        with pytest.raises(SlotFileError, match="in use by another server"):
            opened(tmp_path / "kv")
        with using(tmp_path / "kv2"):
            pass
    with using(tmp_path / "kv"):
        pass


# --- ends ---

WRITER = """
import sys
from pathlib import Path
from tests_of_slots import content, entry, opened
file = opened(Path(sys.argv[1]))
print("ready", flush=True)
seed = 0
while True:
    file.write(seed % 8, entry(seed % 90), content(seed % 90))
    while file._waiting:
        pass
    seed += 1
    if seed == 30:
        print("going", flush=True)
"""


@pytest.mark.parametrize("more", range(4))
def test_a_killed_writer_leaves_whole_blocks_and_nothing_else(tmp_path: Path, more: int) -> None:
    """Killed at some moment of its work, by a signal that nobody can handle."""
    path, script = tmp_path / "kv", tmp_path / "writer.py"
    script.write_text(WRITER)
    (tmp_path / "tests_of_slots.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, str(script), str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(SlotFileError, match="in use"):
            opened(path)
        assert process.stdout.readline() == b"going\n"
        for _ in range(more * 1000):  # some work, lest all be killed at the same place
            hashlib.sha256(b"x").digest()
        process.send_signal(signal.SIGKILL)
    with using(path) as file:
        assert file.num_damaged == 0, "an entry was torn"
        assert len(list(file.entries())) >= NUM_SLOTS - 1, "one slot at most was being written"
        assert len(seeds_in(file)) == len(list(file.entries()))


def test_a_full_disk_costs_what_comes_and_keeps_what_there_is(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path, 2)
    file = opened(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * PAGE, limits[1]))
    try:
        file.write(7, entry(7), content(7))
        file.write(6, entry(6), content(6))
        file.close([])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.is_writable
    assert not file.is_ready
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    with using(path) as file:
        assert seeds_in(file) == [0, 1]
