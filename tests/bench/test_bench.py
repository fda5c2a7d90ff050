"""The whole command on a tiny random model: real contenders, real tables, the JSON's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.__main__ import equality_holds, main
from bench.summary import summarise
from worlds.tiny_bench_model import save_tiny_model

pytestmark = pytest.mark.slow

CONTENDERS = ["transformers", "transformers lookup 10", "gamma 0", "ngram", "nasd fixed 3"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document that one quick run over everything wrote."""
    torch.set_num_threads(1)
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    output = tmp_path_factory.mktemp("out") / "bench.json"
    arguments = ["--quick", "--model", str(folder), "--drafters", "ngram", "nasd:3"]
    assert main([*arguments, "--determinism", "fast", "--output", str(output)]) == 0
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def test_every_cell_is_measured_with_every_contender_it_allows(written: dict[str, Any]) -> None:
    assert written["schema"] == 1
    assert written["machine"]["torch"] == torch.__version__
    assert written["settings"]["num_new_tokens"] == 8
    (model,) = written["models"]
    assert (model["num_parameters"], model["dtype"]) == (51_360, "float32")
    keys = {(c["workload"], c["batch_size"], c["sampling"]["name"]) for c in model["cells"]}
    assert len(model["cells"]) == len(keys) == 3 * 2 * 2
    for cell in model["cells"]:
        names = [row["name"] for row in cell["contenders"]]
        assert names == [
            name for name in CONTENDERS if cell["batch_size"] == 1 or "lookup" not in name
        ]


def test_figures_of_a_row_fit_together(written: dict[str, Any]) -> None:
    for cell in written["models"][0]["cells"]:
        rows = {row["name"]: row for row in cell["contenders"]}
        plain, theirs = rows["gamma 0"], rows["transformers"]
        for row in rows.values():
            speed = row["tokens_per_second"]
            assert row["ratio"] == pytest.approx(speed / plain["tokens_per_second"])
            assert row["vs_transformers"] == pytest.approx(speed / theirs["tokens_per_second"])
            low, high = row["ratio_range"]
            assert low <= row["ratio"] * (1 + 1e-9)
            assert row["ratio"] <= high * (1 + 1e-9)
            if ms := row["step_ms"]:
                parts = ms["draft"] + ms["forward"] + ms["verify"] + ms["other"]
                assert parts == pytest.approx(ms["step"], rel=1e-6)
            assert (row["step_ms"] is None) == row["name"].startswith("transformers")
        assert plain["tokens_per_step"] == theirs["tokens_per_step"] == 1.0
        assert (plain["num_draft_tokens"], plain["acceptance_rate"]) == (0, None)


def test_texts_are_those_of_gamma_0_and_the_greedy_ones_those_of_transformers(
    written: dict[str, Any],
) -> None:
    cells = written["models"][0]["cells"]
    rows = [row for cell in cells for row in cell["contenders"]]
    assert sum(row["num_draft_tokens"] for row in rows if row["name"] == "nasd fixed 3") > 0
    assert all(row["same_text"] == 1.0 for row in rows if "transformers" not in row["name"])
    greedy = [cell for cell in cells if cell["sampling"]["name"] == "greedy"]
    assert all(cell["transformers_agreement"]["equal_outputs"] == 1.0 for cell in greedy)


@pytest.mark.parametrize(
    ("determinism", "same_text", "holds"),
    [("exact", 1.0, True), ("exact", 0.5, False), ("fast", 0.5, True)],
)
def test_a_changed_text_fails_the_command_where_exactness_is_promised(
    determinism: str, same_text: float, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "transformers", "same_text": None}, {"name": "ngram", "same_text": same_text}]
    cell = {"workload": "edit", "batch_size": 4, "sampling": {"name": "greedy"}}
    model = {"name": "m", "determinism": determinism, "cells": [cell | {"contenders": rows}]}
    assert equality_holds(model) is holds
    told = capsys.readouterr().out
    assert ("edit, batch 4, greedy: ngram wrote" in told) is (same_text < 1)


def test_a_steady_run_keeps_the_batch_full_and_times_it_while_it_is(tmp_path: Path) -> None:
    output = tmp_path / "steady.json"
    arguments = ["--model", str(save_tiny_model(tmp_path / "model")), "--quick", "--threads", "1"]
    arguments += ["--workload", "random", "--sampling", "greedy", "--drafters", "ngram"]
    arguments += ["--steady", "--skip-transformers", "--batch", "2", "--prompts", "6"]
    assert main([*arguments, "--output", str(output)]) == 0
    (cell,) = json.loads(output.read_text(encoding="utf-8"))["models"][0]["cells"]
    assert cell["num_prompts"] == 6
    assert cell["contenders"][0]["tokens_per_step"] == 1.0
    for row in cell["contenders"]:
        assert row["same_text"] in (None, 1.0)
        assert row["decode_ratio"] > 0
    with pytest.raises(SystemExit, match="2"):
        main(["--steady"])


def test_an_unknown_drafter_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'oracle'"):
        main(["--model", "no such folder", "--drafters", "oracle"])


def test_the_summary_has_a_row_per_drafter_and_a_column_per_workload(
    written: dict[str, Any],
) -> None:
    told = summarise(written)
    assert told.count("### ") == 4  # two batch sizes, two samplings
    header = next(line for line in told.splitlines() if line.startswith("| drafter"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns == ["drafter", "code", "edit", "random"]
    cell = written["models"][0]["cells"][0]
    row = next(row for row in cell["contenders"] if row["name"] == "nasd fixed 3")
    assert f"{row['decode_ratio']:.2f}x / {row['tokens_per_step']:.2f} / " in told
