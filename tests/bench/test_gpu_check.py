"""The device check, on the CPU: it passes here, it would fail on a difference, it needs no server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.equality import EqualityResult, check_tiny_models
from bench.gpu.backends import BackendResult
from bench.gpu.products import ProductResult
from bench.gpu_check import equality_table, fp32_holds, main, product_table

GOOD = EqualityResult("m", "ngram", "greedy", 2, 2, 2, num_draft_tokens=9, num_accepted_tokens=4)
DIFFERENT = replace(GOOD, num_equal=1)
RIGHT = BackendResult("m", "b", "exact", "float32", 1e-6, 1e-3, same_bits=True, flip_rate=0.0)
FAST = replace(RIGHT, determinism="fast", same_bits=False)
WRONG = replace(RIGHT, error=1e-2)
TIMES = {1: 2e-3, 64: 3e-3}
OWN = ProductResult(64, 8, "bfloat16", True, 1e-3, TIMES, {1: 1e-3, 64: 3e-3})


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
def test_speculation_writes_gamma_0s_text_on_tiny_models() -> None:
    results = check_tiny_models(torch.device("cpu"), num_new_tokens=10)
    assert fp32_holds(results)
    assert {result.model for result in results} == {"tiny Llama", "tiny Qwen3", "tiny Gemma-2"}
    assert {result.batch_size for result in results} == {1, 4}


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
    assert main(["--device", "cpu", "--toy", "--output", str(output)]) == 1
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [each["holds"] for each in document["backends"]] == [each.holds for each in backends]
    assert len(document["fp32_equality"]) == (len(texts) if backends else 0)


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
    found = [(each["dtype"], each["holds"]) for each in document["products"]]
    assert found == [("bfloat16", True), ("4 bits", True)]


@pytest.mark.slow
def test_check_imports_nothing_of_the_server() -> None:
    code = (
        "import sys, bench.gpu_check; print({'server', 'pydantic', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
