"""The device check, on the CPU: it passes here, it would fail on a difference, it needs no server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.equality import EqualityResult, check_tiny_models
from bench.gpu.backends import BackendResult, serving_backends
from bench.gpu.products import ProductResult
from bench.gpu.steps import (
    DeviceAccount,
    StaticCache,
    account_of,
    plain_forward,
    random_model,
)
from bench.gpu_check import PARTS, Ledger, equality_table, fp32_holds, main, product_table
from engine.kernels.triton import is_interpreted
from engine.model.decoder import cache_name
from worlds.interpreted import patching_once
from worlds.tiny_bench_model import save_tiny_model

GOOD = EqualityResult("m", "ngram", "greedy", 2, 2, 2, num_draft_tokens=9, num_accepted_tokens=4)
DIFFERENT = replace(GOOD, num_equal=1)
RIGHT = BackendResult("m", "b", "exact", "float32", 1e-6, 1e-3, same_bits=True, flip_rate=0.0)
FAST = replace(RIGHT, determinism="fast", same_bits=False)
WRONG = replace(RIGHT, error=1e-2)
TIMES = {1: 2e-3, 64: 3e-3}
OWN = ProductResult(64, 8, "bfloat16", True, 1e-3, TIMES, {1: 1e-3, 64: 3e-3})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    with patching_once():
        yield


@pytest.mark.slow
def test_speculation_writes_gamma_0s_text_on_tiny_models() -> None:
    results = check_tiny_models(torch.device("cpu"), num_new_tokens=10)
    assert fp32_holds(results)
    assert {result.model for result in results} == {"tiny Llama", "tiny Qwen3", "tiny Gemma-2"}
    assert {result.batch_size for result in results} == {1, 4}


def test_backends_are_all_that_serve_fp32_here_or_the_named_ones_that_do() -> None:
    device = torch.device("cpu")
    found = serving_backends(device)
    assert {"paged", "sdpa"} <= {*found}
    assert ("triton" in found) == is_interpreted()
    assert serving_backends(device, ["paged", "none such"]) == ["paged"]


def test_equality_holds_only_where_it_was_tested() -> None:
    assert fp32_holds([GOOD])
    never, always = replace(GOOD, num_accepted_tokens=0), replace(GOOD, num_accepted_tokens=9)
    assert [fp32_holds(each) for each in ([GOOD, DIFFERENT], [never], [always], [])] == [False] * 4


def test_table_sums_over_samplings_and_points_at_differences() -> None:
    other = replace(GOOD, sampling="T 1.3")
    lines = equality_table([GOOD, other, replace(DIFFERENT, drafter="nasd")]).splitlines()
    assert ["DIFFER" in line for line in lines[2:4]] == [False, True]
    assert "4 of 4" in lines[2]
    assert "1 of 2" in lines[3]


@pytest.mark.parametrize(
    ("backends", "products", "texts"),
    [
        ([RIGHT, FAST], [OWN], [GOOD, DIFFERENT]),
        ([WRONG, FAST], [OWN], [GOOD]),
        ([], [OWN], [GOOD]),
        ([RIGHT, FAST], [OWN, replace(OWN, keeps_bits=False)], [GOOD]),
        ([RIGHT, FAST], [], [GOOD]),
    ],
)
def test_command_fails_on_a_difference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backends: list[BackendResult],
    products: list[ProductResult],
    texts: list[EqualityResult],
) -> None:
    monkeypatch.setattr("bench.gpu_check.check_backends", lambda *_: backends)
    monkeypatch.setattr("bench.gpu_check.check_products", lambda *_: products)
    monkeypatch.setattr("bench.gpu_check.check_tiny_models", lambda *_, **__: texts)
    output = tmp_path / "check.json"
    asked = ["--part", "backends", "products", "texts", "--backend", "paged"]
    assert main(["--device", "cpu", "--toy", "--output", str(output), *asked]) == 1
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [each["holds"] for each in document["backends"]] == [each.holds for each in backends]
    assert len(document["fp32_equality"]) == len(texts)


def test_exact_keeps_a_rows_bits_in_calls_of_any_size_and_fast_need_not() -> None:
    assert OWN.holds
    assert not any(each.holds for each in (replace(OWN, keeps_bits=False), replace(OWN, error=0.1)))
    first, second = product_table([OWN, replace(OWN, error=0.1)]).splitlines()[2:]
    assert all(ratio in first for ratio in ("2.00x", "1.00x"))
    assert ["WRONG" in line for line in (first, second)] == [False, True]
    holding = [replace(RIGHT, same_bits=None), FAST, replace(FAST, flip_rate=0.01)]
    broken = [replace(RIGHT, same_bits=False), replace(RIGHT, flip_rate=0.01), WRONG]
    assert [each.holds for each in holding + broken] == [True] * 3 + [False] * 3


@pytest.mark.slow
def test_the_command_passes_here_at_toy_size(tmp_path: Path) -> None:
    """The same command as on a GPU, on the backend that is GPUs' under its interpreter."""
    output = tmp_path / "check.json"
    code = main(["--device", "cpu", "--toy", "--backend", "triton", "--output", str(output)])
    document = json.loads(output.read_text(encoding="utf-8"))
    assert code == 0, document
    assert {each["backend"] for each in document["backends"]} == {"triton"}
    assert {each["determinism"] for each in document["backends"]} == {"exact", "fast"}
    assert document["fp32_holds"]
    assert set(document["seconds"]) == set(PARTS)
    found = [(each["dtype"], each["holds"]) for each in document["products"]]
    assert found == [("bfloat16", True), ("4 bits", True)]


def steps(tmp_path: Path, *asked: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "check.json"
    code = main(["--device", "cpu", "--toy", "--output", str(output), *asked])
    return code, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_steps_are_told_beside_torch_s_own(tmp_path: Path) -> None:
    code, document = steps(tmp_path, "--part", "smollm2", "8b-int4")
    assert code == 0
    found = document["steps smollm2 bf16"]["steps"]
    cases = [(each["what"], each["num_requests"], each["num_kv_tokens"]) for each in found]
    whats = ("fast", "exact", "torch")
    assert cases == [(what, size, 8) for what in whats for size in (1, 2)]
    assert all(min(each["seconds"], each["share"]) > 0 for each in found)
    # Of the same bytes: weights, and keys and values.
    by_case = {case[:2]: each["num_bytes"] for case, each in zip(cases, found, strict=True)}
    assert by_case["torch", 2] == pytest.approx(by_case["fast", 2], rel=0.1)
    few = document["steps 8b int4"]["steps"]
    assert few[0]["num_bytes"] < found[0]["num_bytes"]


def test_torch_s_step_writes_what_the_model_says() -> None:
    """Its cache is what a step before it left there, the last place is the row's own."""
    model = random_model("toy", torch.device("cpu")).float()
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits[:, -1]
        held = model(ids[:, :-1], use_cache=True)[cache_name(model)]
        cache = StaticCache(model, 2, 8)
        for (keys, values), layer in zip(cache.planes, held.layers, strict=True):
            keys[:, :, :8], values[:, :, :8] = layer.keys, layer.values
        logits = plain_forward(model, ids[:, -1:], cache)
    assert torch.allclose(logits, expected, atol=1e-5)


def test_what_there_was_no_time_for_is_told(tmp_path: Path) -> None:
    _, document = steps(tmp_path, "--part", "8b", "--seconds", "0")
    assert document["left_out"][0] == "8b bf16, fast"
    assert len(document["left_out"]) == 4


def test_figures_are_kept_as_they_come(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "out.json", {})

    def cut() -> None:
        with ledger.part("cut", 10):
            ledger.put("first", 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut()
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == {"first": 1}


def test_idle_between_steps_is_told_from_gaps_within_them() -> None:
    """Two steps of three launches, the last two of which overlap, with five seconds in between."""
    step = [(0.0, 1.0), (1.5, 3.0), (2.0, 4.0)]
    spans = [*step, *((start + 9.0, end + 9.0) for start, end in step)]
    account = account_of(spans[::-1], 2)
    assert account == DeviceAccount(3.0, 3.5, 3.0, 5.0)


def test_drafts_are_told_beside_plain_decoding(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    asked = ["--part", "drafts", "texts", "--model", str(model), "--workload", "code"]
    # The tiny models' texts on what is interpreted are the whole command's, above.
    asked += ["--backend", "paged"]
    _, document = steps(tmp_path, *asked, "--batch", "1", "--rounds", "1", "--prompts", "1")
    (cell,) = document["models"][0]["cells"]
    assert {"gamma 0", "ngram", "suffix", "auto"} <= {each["name"] for each in cell["contenders"]}
    assert [each["determinism"] for each in document["texts"]] == ["exact", "fast"]


@pytest.mark.slow
def test_check_imports_nothing_of_the_server() -> None:
    code = "import sys, bench.gpu_check; print({'server', 'pydantic', 'uvicorn'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
