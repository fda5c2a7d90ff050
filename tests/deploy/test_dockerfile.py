"""The Dockerfile passes hadolint, whose findings are all errors here, and finds the dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from worlds.deploy_tools import ROOT, python_tool


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [python_tool("hadolint"), "--no-color", "--failure-threshold", "style", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    result = hadolint(ROOT / "Dockerfile")
    assert result.returncode == 0, result.stdout


def test_the_image_gets_the_dependencies_and_those_of_the_extras_that_are_named() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    (program,) = re.findall(r'^RUN python -c "([^"]*)" > dependencies\.txt', text, re.MULTILINE)
    command = [sys.executable, "-c", program]
    how: Any = {"cwd": ROOT, "env": {"EXTRAS": "kv-events otel"}, "text": True}
    listed = subprocess.run(command, **how, capture_output=True, check=True).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (project["optional-dependencies"][name] for name in ("gguf", "kv-events", "otel"))
    assert listed == [*project["dependencies"], *(each for extra in extras for each in extra)]
    # What the next step looks for, to take torch from an index of its own.
    assert len([each for each in listed if each.startswith("torch>")]) == 1
