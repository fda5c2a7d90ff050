"""Loops are compiled with the records that Python fills in; where machine code is kept, see
tests/engine/kernels/test_compiled.py."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Protocol

import pytest
from numba import njit

from drafters.compiled import (
    Floats,
    Integers,
    Loop,
    Many,
    Memory,
    Tokens,
    address_of,
    is_nowhere,
    version_of,
)


class Part(Protocol):
    number: int
    share: float


class Whole(Protocol):
    tokens: Tokens
    numbers: Integers
    shares: Floats
    parts: Many[Part]
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


ADD = Loop(_sum, Whole, int)


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
