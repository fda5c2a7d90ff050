"""Where the tools are that check what is deployed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def debian_tool(name: str) -> str:
    """Path of a program of Debian's package prometheus; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: apt-get install --no-install-recommends prometheus")
    return found


def python_tool(name: str) -> str:
    """Path of a program that the extra ``dev`` installs; it has to be there."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"no {name} here: pip install -e .[dev]"
    return found
