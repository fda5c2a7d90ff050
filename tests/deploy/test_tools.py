"""Missing tools are told, and the script that brings them is sound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worlds.deploy_tools import REQUIRED, ROOT, debian_tool, python_tool


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any program; the folder Python is in."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv(REQUIRED, raising=False)
    return tmp_path


@pytest.mark.usefixtures("empty")
def test_without_prometheus_a_test_is_skipped_and_says_what_brings_it() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"no promtool here: scripts/prometheus"):
        debian_tool("promtool")


@pytest.mark.usefixtures("empty")
def test_where_prometheus_is_required_its_absence_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no promtool here"):
        debian_tool("promtool")


@pytest.mark.usefixtures("empty")
def test_what_pip_installs_is_never_skipped() -> None:
    with pytest.raises(AssertionError, match="pip install"):
        python_tool("hadolint")


def test_a_tool_beside_python_is_found_first(empty: Path) -> None:
    (empty / "promtool").touch()
    assert debian_tool("promtool") == str(empty / "promtool")


def test_the_script_that_fetches_prometheus_is_sound_and_ci_calls_it() -> None:
    path = ROOT / "scripts" / "prometheus"
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"if scripts/prometheus; then export {REQUIRED}=1; fi" in ci
