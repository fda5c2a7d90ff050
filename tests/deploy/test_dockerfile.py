"""The Dockerfile passes hadolint, whose findings are all errors here."""

from __future__ import annotations

import subprocess
from pathlib import Path

from worlds.deploy_tools import ROOT, python_tool


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [python_tool("hadolint"), "--no-color", "--failure-threshold", "style", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    result = hadolint(ROOT / "Dockerfile")
    assert result.returncode == 0, result.stdout


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    text = (ROOT / "Dockerfile").read_text()
    bad.write_text(text.replace("WORKDIR /src", "WORKDIR src").replace("USER 10001", "USER root"))
    result = hadolint(bad)
    assert result.returncode != 0
    assert "DL3000" in result.stdout
    assert "DL3002" in result.stdout
