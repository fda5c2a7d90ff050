"""Results that are kept, and the tables made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.scoreboard import entries, keep, newest_tables, page

PLAIN, DRAFTING = "theirs q4 plain (HTTP)", "theirs q4 ngram (HTTP)"


def arm(name: str, speed: float, same: float | None = None) -> dict[str, Any]:
    way = {"speculates": "plain" not in name, "over_http": "HTTP" in name}
    figures = {"tokens_per_second": speed, "same_as_plain": same, "decode_ratio": 1.0}
    return {"name": name, **way, **figures}


def results(path: Path, taken_at: str = "2026-11-27T10:00:00+00:00", speed: float = 50.0) -> Path:
    """Writes results of two cells, the second without the rival's look-up."""
    arms = [
        arm(PLAIN, speed),
        arm(DRAFTING, 60.0, 0.75),
        arm("theirs q4 lookup (HTTP)", 55.0, 0.5),
        arm("ours q4 plain (HTTP)", 100.0),
        arm("ours q4 auto (HTTP)", 150.0, 1.0),
    ]
    cell = {"workload": "edit", "num_new_tokens": 128, "num_rounds": 3}
    greedy = {"name": "greedy", "temperature": 0.0}
    document = {
        "taken_at": taken_at,
        "commit": "0abc123",
        "settings": {"command": "python -m bench.peers --model smollm2", "reference": PLAIN},
        "machine": {"processor": "A Processor", "num_threads": 2, "isa": "avx avx2 fma"},
        "workers": {"ours q4": {"torch": "2.13.0", "model": "a name", "command": "/a/path"}},
        "unavailable": {"vllm": "no wheel"},
        "cells": [
            {**cell, "batch_size": 1, "sampling": greedy, "arms": arms},
            {**cell, "batch_size": 8, "sampling": greedy, "arms": [arms[0], *arms[3:]]},
        ],
    }
    path.write_text(json.dumps(document))
    return path


def test_each_arm_has_a_row_and_its_best_speculation_another(tmp_path: Path) -> None:
    keep(results(tmp_path / "results"), "zen", "A model, Q4_0", tmp_path)
    text = page(tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[each.strip() for each in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["requests at once", "*edit*, 1", "*edit*, 8", "texts as without drafts"]
    assert rows[2:] == [
        [PLAIN, "50 tok/s", "50 tok/s", ""],
        ["its best speculation", "1.20x ngram", "-", "75%"],
        ["ours q4 plain (HTTP)", "2.00x", "2.00x", ""],
        ["its best speculation", "3.00x auto", "3.00x auto", "100%"],
    ]
    assert "## A model, Q4_0, A Processor, 2026-11-27" in text
    assert "python -m bench.peers --model smollm2" in text
    assert "commit `0abc123`, torch 2.13.0. Instructions: avx2." in text
    assert "Not measured: vllm: no wheel" in text
    assert "/a/path" not in (tmp_path / "zen.json").read_text()


def test_the_newest_of_a_title_is_shown_without_its_command(tmp_path: Path) -> None:
    keep(results(tmp_path / "results"), "old", "A model, Q4_0", tmp_path)
    newer = results(tmp_path / "results", "2026-11-28T10:00:00+00:00", speed=40.0)
    keep(newer, "new", "A model, Q4_0", tmp_path)
    assert [entry["taken_at"][:10] for entry in entries(tmp_path)] == ["2026-11-28", "2026-11-27"]
    text = newest_tables(tmp_path)
    assert text.startswith("A model, Q4_0, on 2 cores of an A Processor:\n")
    assert "40 tok/s" in text
    assert "50 tok/s" not in text
    assert "bench.peers" not in text


def test_what_are_no_results_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_text("{}")
    with pytest.raises(KeyError):
        keep(path, "x", "y", tmp_path)
    assert not entries(tmp_path)
