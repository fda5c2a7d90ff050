"""The host's part of a step, around a forward that costs nothing."""

from __future__ import annotations

import pytest

from bench.host import FreeRunner, measure
from bench.models import load_bench_model
from engine.batch import RequestRows, build_batch
from engine.config import EngineConfig


def test_the_stand_in_names_one_token_for_each_row() -> None:
    runner = FreeRunner(vocab_size=400, hidden_size=8, repeats=True, max_rows=8)
    for base in (3, 9):  # a second forward has forgotten the first one's tokens
        rows = RequestRows([301 + base, 302 + base], 1, base, [-1], [0, 1, 2, 3], 2)
        found = runner.forward(build_batch([rows], 4, (1,)))
        assert found.logits.argmax(-1).tolist() == [302 + base, 303 + base]
        assert [each.shape for each in found.hidden] == [(2, 8)]


@pytest.mark.parametrize(("repeats", "tokens"), [(False, 1.0), (True, 5.0)])
def test_drafts_of_what_repeats_are_right_and_elsewhere_there_are_none(
    repeats: bool, tokens: float
) -> None:
    core = load_bench_model("bundled", EngineConfig(max_num_seqs=2), False).core
    hidden_size = int(core.runner.model.config.hidden_size)  # type: ignore[attr-defined]
    found = measure(core, hidden_size, "ngram", 2, repeats, num_tokens=60)
    assert found.tokens == pytest.approx(tokens, abs=0.5)
    assert found.step > 0
    assert not core.has_work
