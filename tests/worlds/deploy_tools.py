"""Where the tools are that check what is deployed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
REQUIRED = "REQUIRE_PROMETHEUS"


def find_tool(name: str) -> str | None:
    """Beside this Python first, where extras and scripts/prometheus put it."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def debian_tool(name: str) -> str:
    """Path of a program of Debian's package prometheus. Without it the test is skipped, or fails
    where ``REQUIRE_PROMETHEUS`` is set."""
    found = find_tool(name)
    if found is None:
        missing = f"no {name} here: scripts/prometheus or Debian's package prometheus brings it"
        if os.environ.get(REQUIRED):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def python_tool(name: str) -> str:
    """Path of a program that the extra ``dev`` installs; it has to be there."""
    found = find_tool(name)
    assert found is not None, f"no {name} here: pip install -e .[dev]"
    return found
