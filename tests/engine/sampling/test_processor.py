"""A sampling parameter is one file: the one that docs/extend.md shows, as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.sampling.processor import (
    LogitsProcessor,
    Parameter,
    Stage,
    parameters,
    processors,
    register,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "extend.md"
SIZE = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("processors")
    example = re.search(r'no_repeat_ngram.py"\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)
    assert example is not None
    (folder / "no_repeat_ngram.py").write_text(example[1], encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "worlds.processor_visit", str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_its_file_alone_puts_a_field_into_both_schemas(found: dict[str, Any]) -> None:
    assert [each["default"] for each in found["schemas"]] == [0, 0]
    assert all("twice" in each["description"] for each in found["schemas"])
    assert found["statuses"] == [200, 200]
    assert found["further"] == [{"no_repeat_ngram_size": SIZE}] * 2


def test_values_out_of_its_bounds_are_refused_by_name(found: dict[str, Any]) -> None:
    assert found["refusals"] == [[400, "no_repeat_ngram_size"]] * 6


def repeats(prompt: list[int], text: list[int]) -> int:
    """How many tokens of the output complete a sequence that stands before."""
    tokens = prompt + text
    ends = [tuple(tokens[i - SIZE + 1 : i + 1]) for i in range(SIZE - 1, len(tokens))]
    return sum(each in ends[:i] for i, each in enumerate(ends) if i > len(prompt) - SIZE)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_it_holds_and_texts_are_equal_with_and_without_drafts(
    found: dict[str, Any], name: str
) -> None:
    (plain, *drafted), (_, *accepted) = found[name]
    assert drafted == [plain] * len(drafted)
    assert min(accepted) > 0
    assert len(plain) == 40
    assert repeats(found["prompt"], plain) == 0
    assert repeats(found["prompt"], found["without"][0][0]) > 0


def test_it_holds_where_drafts_are_verified_by_rejection(found: dict[str, Any]) -> None:
    texts, accepted = found["in_distribution"]
    assert [repeats(found["prompt"], text) for text in texts] == [0, 0]
    assert min(accepted) > 0


def test_parameters_have_names_of_their_own() -> None:
    names = [each.name for each in parameters()]
    assert len(set(names)) == len(names)
    assert [cls.stage for cls in processors()] == sorted(cls.stage for cls in processors())

    class Other(LogitsProcessor):
        stage = Stage.BIAS
        parameters = (Parameter("logit_bias", float, 0.0, ""),)

    with pytest.raises(ValueError, match="logit_bias belongs to LogitBias"):
        register(Other)
