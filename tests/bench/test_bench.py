"""The whole command on a tiny random model: real contenders, real tables, the JSON's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.__main__ import equality_holds, main
from bench.contenders import parse_drafter
from bench.summary import summarise
from worlds.tiny_bench_model import save_tiny_model

pytestmark = pytest.mark.slow

CONTENDERS = ["transformers", "transformers lookup 10", "gamma 0", "ngram", "nasd fixed 3"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one quick run over everything wrote."""
    torch.set_num_threads(1)
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    output = tmp_path_factory.mktemp("out") / "bench.json"
    arguments = ["--quick", "--model", str(folder), "--drafters", "ngram", "nasd:3"]
    assert main([*arguments, "--determinism", "fast", "--output", str(output)]) == 0
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def test_json_says_machine_settings_and_model(written: dict[str, Any]) -> None:
    assert written["schema"] == 1
    assert written["machine"]["torch"] == torch.__version__
    assert written["machine"]["num_threads"] == 1
    assert written["settings"]["num_new_tokens"] == 8
    (model,) = written["models"]
    assert model["num_parameters"] == 51_360
    assert model["dtype"] == "float32"
    assert model["name"] in model["what"]


def test_every_cell_is_measured_with_every_contender_it_allows(written: dict[str, Any]) -> None:
    cells = written["models"][0]["cells"]
    keys = [(cell["workload"], cell["batch_size"], cell["sampling"]["name"]) for cell in cells]
    assert sorted(keys) == sorted(
        (workload, batch_size, sampling)
        for workload in ("code", "edit", "random")
        for batch_size in (1, 2)
        for sampling in ("greedy", "sampled")
    )
    for cell in cells:
        names = [row["name"] for row in cell["contenders"]]
        assert names == [
            name for name in CONTENDERS if cell["batch_size"] == 1 or "lookup" not in name
        ]


def test_figures_of_a_row_fit_together(written: dict[str, Any]) -> None:
    for cell in written["models"][0]["cells"]:
        rows = {row["name"]: row for row in cell["contenders"]}
        for row in rows.values():
            speed = row["tokens_per_second"]
            assert row["ratio"] == pytest.approx(speed / rows["gamma 0"]["tokens_per_second"])
            assert row["vs_transformers"] == pytest.approx(
                speed / rows["transformers"]["tokens_per_second"]
            )
            low, high = row["ratio_range"]
            assert low <= row["ratio"] * (1 + 1e-9)
            assert row["ratio"] <= high * (1 + 1e-9)
        assert rows["gamma 0"]["tokens_per_step"] == rows["transformers"]["tokens_per_step"] == 1.0
        assert rows["gamma 0"]["num_draft_tokens"] == 0
        assert rows["gamma 0"]["acceptance_rate"] is None


def test_step_parts_add_up_to_the_step(written: dict[str, Any]) -> None:
    for cell in written["models"][0]["cells"]:
        for row in cell["contenders"]:
            ms = row["step_ms"]
            if row["name"].startswith("transformers"):
                assert ms is None
                continue
            parts = ms["draft"] + ms["forward"] + ms["verify"] + ms["other"]
            assert parts == pytest.approx(ms["step"], rel=1e-6)
            assert ms["outside_forward"] == pytest.approx(ms["step"] - ms["forward"])


def test_drafts_were_made_and_changed_no_text(written: dict[str, Any]) -> None:
    rows = [row for cell in written["models"][0]["cells"] for row in cell["contenders"]]
    fixed = [row for row in rows if row["name"] == "nasd fixed 3"]
    assert sum(row["num_draft_tokens"] for row in fixed) > 0
    assert all(row["same_text"] == 1.0 for row in rows if "transformers" not in row["name"])


def test_transformers_writes_the_same_greedy_text(written: dict[str, Any]) -> None:
    """In fp32, padding on the left or not, end of text ignored by both."""
    greedy = [
        cell for cell in written["models"][0]["cells"] if cell["sampling"]["name"] == "greedy"
    ]
    assert all(cell["transformers_agreement"]["equal_outputs"] == 1.0 for cell in greedy)


@pytest.mark.parametrize(
    ("determinism", "same_text", "holds"),
    [("exact", 1.0, True), ("exact", 0.5, False), ("fast", 0.5, True)],
)
def test_a_changed_text_fails_the_command_where_exactness_is_promised(
    determinism: str, same_text: float, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name": "ngram", "same_text": same_text}
    cell = {
        "workload": "edit",
        "batch_size": 4,
        "sampling": {"name": "greedy"},
        "contenders": [{"name": "transformers", "same_text": None}, row],
    }
    model = {"name": "bundled", "determinism": determinism, "cells": [cell]}
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
    for row in cell["contenders"]:
        assert row["same_text"] in (None, 1.0)
        assert row["decode_ratio"] > 0
    assert cell["num_prompts"] == 6
    gamma_0 = cell["contenders"][0]
    assert gamma_0["tokens_per_step"] == 1.0
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
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "drafter",
        "code",
        "edit",
        "random",
    ]
    cell = written["models"][0]["cells"][0]
    row = next(row for row in cell["contenders"] if row["name"] == "nasd fixed 3")
    assert f"{row['decode_ratio']:.2f}x / {row['tokens_per_step']:.2f} / " in told


@pytest.mark.parametrize(
    ("text", "name", "width", "policy", "num_tokens"),
    [
        ("ngram", "ngram", 1, "goodput", 8),
        ("ngramx3", "ngram tree 3", 3, "goodput", 8),
        ("nasd:5", "nasd fixed 5", 1, "fixed", 5),
        ("nasdx2:5", "nasd tree 2 fixed 5", 2, "fixed", 5),
    ],
)
def test_drafters_are_named_with_shape_and_gamma(
    text: str, name: str, width: int, policy: str, num_tokens: int
) -> None:
    told, params = parse_drafter(text, ["none", "ngram", "nasd"])
    assert told == name
    assert (params.shape.width, params.adaptive_depth, params.num_speculative_tokens) == (
        width,
        policy,
        num_tokens,
    )


@pytest.mark.parametrize("text", ["none", "ngramx0", "ngram:", "ngram:x", "ngram:0", "other"])
def test_what_names_no_drafting_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="drafter|after the"):
        parse_drafter(text, ["none", "ngram"])
