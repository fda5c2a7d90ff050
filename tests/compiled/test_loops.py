"""Loops are compiled once for a machine, with the records that Python fills in."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest
from numba import njit

from compiled.cache import sources_of, version_of
from compiled.loops import Loop, callee
from compiled.records import Float64s, Int32s, Int64s, Memory, address_of, is_nowhere


class Part(Protocol):
    number: int
    share: float


class Whole(Protocol):
    tokens: Int32s
    numbers: Int64s
    shares: Float64s
    parts: Sequence[Part]
    best: Part
    missing: Part
    count: int


@njit
def _half(w: Whole, at: int) -> float:
    return w.parts[at].share / 2


def _sum(w: Whole, start: int) -> int:
    """Sums all that there is, and notes something in each."""
    total = w.best.number
    for at in range(start, w.count):
        part = w.parts[at]
        part.share = w.shares[at]
        total += w.tokens[at] + w.numbers[at] + part.number
        part.number = int(8 * _half(w, at))
    w.count += 1
    return total if is_nowhere(w.missing) and not is_nowhere(w.best) else -1


ADD = Loop(_sum)


def test_compiled_code_reads_and_writes_what_python_does() -> None:
    parts, best, whole = Memory(Part, 3), Memory(Part), Memory(Whole)
    tokens, numbers = array("i", [1, 2, 4]), array("q", [8, 16, 1 << 40])
    shares = array("d", [0.25, 0.5, 1.0])
    best["number"], parts["number"] = 100, 7
    whole["tokens"], whole["numbers"] = address_of(tokens), address_of(numbers)
    whole["shares"], whole["parts"] = address_of(shares), parts.address
    whole["best"], whole["count"] = best.address, 3
    add = ADD.compile()
    assert add(whole.address, 0) == 100 + 7 + 24 + 7 + (1 << 40)
    assert parts["number"] == 1
    assert whole["count"] == 4
    whole["count"] = 3
    assert add(whole.address, 1) == 100 + 18 + 4 + (1 << 40) + 2 + 4
    assert ADD.compile() is add


@callee
def _weighed(place: tuple[int, int], factor: int, is_odd: bool) -> int:
    return (place[0] * 10 + place[1]) * factor + is_odd


def _weigh(w: Whole, at: int) -> int:
    """Constants of several kinds, an integer of 32 bits and variables."""
    read = w.tokens[at]
    return (
        _weighed((0, at), 1000, True)
        + _weighed((at, read), read, at > 0)
        + _weighed((-1, 0), at, is_odd=False)
    )


def test_a_callee_is_compiled_once_for_constants_and_widths_of_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what is kept is not compiled
    whole, tokens = Memory(Whole), array("i", [0, 3])
    whole["tokens"] = address_of(tokens)
    assert Loop(_weigh).compile()(whole.address, 1) == 1001 + (13 * 3 + 1) - 10
    assert len(_weighed.signatures) == 1


def test_a_field_that_is_not_declared_is_refused() -> None:
    part = Memory(Part)
    with pytest.raises(KeyError):
        part["numbers"] = 1
    with pytest.raises(KeyError):
        part["numbers"]


def test_the_same_files_in_another_place_are_another_version(tmp_path: Path) -> None:
    """numba would compile them anew, and whether a version was compiled is asked by its folder."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "loops.py").write_text("pass")
    one, other = (version_of([tmp_path / name / "loops.py"]) for name in "ab")
    assert one == version_of([tmp_path / "a" / "loops.py"]) != other


def test_a_version_is_of_all_files_that_are_imported() -> None:
    from drafters.merged import grow_loops

    files = sources_of(Path(str(grow_loops.__file__)), "drafters")
    names = {path.name for path in files}
    assert {"grow_loops.py", "row_loops.py", "index_loops.py", "weights.py", "contexts.py"} <= names
    assert {path.parent.name for path in files if path.name == "records.py"} == {
        "copying",
        "merged",
    }
    assert not names & {"suffix.py", "registry.py"}


def test_machine_code_is_kept_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of versions which nobody has used for long is not."""
    folder = tmp_path / "slipstream" / "kernels"
    for name, days in (("recent", 20), ("old", 40)):
        (folder / name / "inner").mkdir(parents=True)
        used = time.time() - days * 24 * 3600
        os.utime(folder / name, (used, used))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loop = Loop(_sum)
    loop.compile()
    (kept,) = tmp_path.rglob("*_sum*.nbi")
    version = kept.relative_to(folder).parts[0]
    assert version == loop.version()
    assert sorted(each.name for each in folder.iterdir()) == sorted(["recent", version])


def test_a_place_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slipstream").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert callable(Loop(_sum).compile())
