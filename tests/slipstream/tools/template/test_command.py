"""The command finds a template that the server can be started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.tables.stand import StandDrafter
from drafters.tables.template import load_template
from slipstream.cli import main

HERE = str(Path(__file__).parent)
"""A folder that holds no model."""
GOOD = json.dumps({"prompt": "a", "completion": "b"})
CODE = "for index in range(10):\n    print(index)\n"


def test_a_log_becomes_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "tree.json"
    log.write_text(json.dumps({"prompt": CODE * 3, "completion": CODE * 2}))
    assert main(["stand-template", str(log), "--out", str(out), "--nodes", "12"]) == 0
    assert "12 nodes" in capsys.readouterr().out
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, arguments: list[str], part: str
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line)
    assert main(["stand-template", str(log), "--out", str(tmp_path / "t"), *arguments]) == 2
    err = capsys.readouterr().err
    assert part in err[err.index("slipstream: ") :]
    assert "Traceback" not in err
    assert not (tmp_path / "t").exists()
