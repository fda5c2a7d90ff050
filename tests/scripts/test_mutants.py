"""scripts/mutants.py and its list of faults: each fits the code as it is, and the runner tells what is
noticed from what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import KILLED, MUTANTS, STALE, SURVIVED, TIMED_OUT, Copy, Mutant

ROOT = Path(__file__).resolve().parents[2]
LISTED = mutants.load(MUTANTS)
PLACE = ("code_of_it.py", "Adder.add")
FAULT = Mutant("wrong-sum", "sums", "It subtracts.", *PLACE, "a + b", "a - b", ("test_code.py",))
CODE = """
class Adder:
    @staticmethod
    def add(a, b):
        return a + b

def other(a, b):
    return a + b
"""
TEST = """
from code_of_it import Adder

def test_sums():
    assert Adder.add(2, 3) == 5
"""


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.name)
def test_every_listed_fault_fits_the_code(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutants.mutated(source, mutant) != source
    assert mutant.tests
    assert all((ROOT / name).is_file() for name in mutant.tests)


def test_names_are_unique_and_select() -> None:
    assert len({each.name for each in LISTED}) == len(LISTED)
    (first, *_) = LISTED
    assert mutants.chosen(LISTED, [first.name]) == [first]
    assert set(mutants.chosen(LISTED, [first.part])) > {first}
    with pytest.raises(SystemExit, match="no-such-name"):
        mutants.chosen(LISTED, ["no-such-name"])


def test_a_fault_is_put_into_its_function_only() -> None:
    assert mutants.mutated(CODE, FAULT).count("a - b") == 1
    assert "return a + b" in mutants.mutated(CODE, FAULT).partition("def other")[2]
    for changed in ({"old": "a * b"}, {"old": "a"}, {"function": "Adder.gone"}):
        with pytest.raises(mutants.StaleError):
            mutants.mutated(CODE, replace(FAULT, **changed))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    source = tmp_path / "source"
    source.mkdir()
    (source / "code_of_it.py").write_text(CODE)
    (source / "test_code.py").write_text(TEST)
    monkeypatch.setattr(mutants, "ROOT", source)
    return Copy(tmp_path)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, KILLED),
        ({"function": "other"}, SURVIVED),
        ({"old": "b + a"}, STALE),
        ({"tests": ("test_gone.py",)}, STALE),
        ({"new": "exec('while True: pass')"}, TIMED_OUT),
    ],
)
def test_the_verdict_is_what_the_tests_say(
    copy: Copy, changed: dict[str, object], verdict: str
) -> None:
    mutant = replace(FAULT, **changed)  # type: ignore[arg-type]
    seconds = 5.0 if verdict == TIMED_OUT else 300.0
    found, detail = copy.judge(mutant, mutant.tests, seconds)
    assert found == verdict
    assert ("test_sums" in detail) == (verdict == KILLED)
    assert (copy.root / "code_of_it.py").read_text() == CODE
