"""``scripts/test --turn``: consecutive turns run every slow test once, and every other test each time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from worlds.turns import NUM_TURNS

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("cell", range(40))
def test_slow(cell):
    pass

def test_quick():
    pass
"""


def test_turns_share_the_slow_tests_out(tmp_path: Path) -> None:
    (tmp_path / "test_cells.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    settings = f"[pytest]\nmarkers = slow\npythonpath = {ROOT / 'tests'}\n"
    (tmp_path / "pytest.ini").write_text(settings)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    counts: Counter[str] = Counter()
    for turn in range(7, 7 + NUM_TURNS):
        run = subprocess.run(
            [*command, f"--turn={turn}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        counts.update(line for line in run.stdout.splitlines() if "::" in line)
    quick = counts.pop("test_cells.py::test_quick")
    assert quick == NUM_TURNS
    assert len(counts) == 40
    assert set(counts.values()) == {1}
