"""The command finds a template that the server can be started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.tables.stand import StandDrafter
from drafters.tables.template import load_template
from worlds.commands import Run

HERE = str(Path(__file__).parent)
"""A folder that holds no model."""
GOOD = json.dumps({"prompt": "a", "completion": "b"})
CODE = "for index in range(10):\n    print(index)\n"


def test_a_log_becomes_a_template(tmp_path: Path, run: Run) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "tree.json"
    log.write_text(json.dumps({"prompt": CODE * 3, "completion": CODE * 2}))
    assert "12 nodes" in run("stand-template", log, "--out", out, "--nodes", 12).out
    assert len(load_template(out)) == 12
    StandDrafter(str(out))  # raises for what it cannot use


@pytest.mark.parametrize(
    ("line", "arguments", "part"),
    [
        ('{"prompt": "a"}', [], "completion is missing"),
        ("", [], "no text"),
        (GOOD, ["--nodes", "0"], "--nodes"),
        (GOOD, ["--model", HERE], HERE),
        (GOOD, ["--device", "tpu"], "device: 'tpu'"),
        (GOOD, ["--device", "cuda:99"], "device cuda:99"),
        (json.dumps({"prompt": "a\ud83d", "completion": "b"}), [], "line 1 of "),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, run: Run, line: str, arguments: list[str], part: str
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line)
    err = run("stand-template", log, "--out", tmp_path / "t", *arguments, status=2).err
    assert part in err[err.index("slipstream: ") :]
    assert "Traceback" not in err
    assert not (tmp_path / "t").exists()
