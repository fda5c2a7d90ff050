"""Missing tools are told, and the script that brings them is sound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worlds.deploy_tools import REQUIRED, ROOT, debian_tool, python_tool


def test_a_missing_tool_is_told_and_fails_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no promtool here: scripts/prometheus"):
        debian_tool("promtool")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no promtool here"):
        debian_tool("promtool")
    with pytest.raises(AssertionError, match="pip install"):
        python_tool("hadolint")
    # One beside Python is found first.
    (tmp_path / "promtool").touch()
    assert debian_tool("promtool") == str(tmp_path / "promtool")


def test_the_script_that_fetches_prometheus_is_sound_and_ci_calls_it() -> None:
    path = ROOT / "scripts" / "prometheus"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"if scripts/prometheus; then export {REQUIRED}=1; fi" in ci
