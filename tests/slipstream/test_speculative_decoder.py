"""The draft-verify module's decoder, on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.model.loader import BUNDLED
from engine.model.runner import ModelRunner
from engine.request.errors import RequestError, RequestFailedError
from slipstream.speculative_config import SpeculativeConfig
from slipstream.speculative_decoder import SpeculativeDecoder

pytestmark = pytest.mark.slow

TARGET = str(BUNDLED / "target")
# One thread: where another process wants a core, two wait for each other.
SMALL = EngineConfig(
    max_num_seqs=1,
    num_blocks=24,
    max_num_batched_tokens=64,
    prefill_chunk=64,
    dtype="float32",
    num_threads=1,
)
PROMPT = [0, 40, 41, 42, 43, 40, 41, 42]
GREEDY = SpeculativeConfig(draft_strategy="ngram", temperature=0.0)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    decoder = SpeculativeDecoder(SMALL)
    decoder.setup(TARGET, GREEDY)
    return decoder


@pytest.fixture(scope="module")
def plain() -> list[int]:
    decoder = SpeculativeDecoder(SMALL)
    decoder.setup(TARGET, replace(GREEDY, draft_strategy="none"))
    token_ids, stats = decoder.decode_step(PROMPT, 40)
    assert (stats["tokens_per_step"], stats["acceptance_rate"]) == (1, 0)
    return token_ids


def test_the_text_is_the_targets_own_and_the_account_adds_up(
    decoder: SpeculativeDecoder, plain: list[int]
) -> None:
    token_ids, stats = decoder.decode_step(PROMPT, 40)
    assert token_ids == plain
    assert stats["num_tokens"] == len(token_ids)
    assert stats["num_steps"] * stats["tokens_per_step"] == pytest.approx(len(token_ids))
    assert 0 <= stats["acceptance_rate"] <= 1
    assert stats["speedup"] > 0
    assert stats["verify_latency"] > stats["draft_latency"] >= 0
    assert decoder.get_acceptance_rate() == pytest.approx(decoder.report()["acceptance_rate"])


def test_the_report_leaves_out_what_is_not_logged(
    decoder: SpeculativeDecoder, plain: list[int]
) -> None:
    quiet = replace(GREEDY, log_acceptance_rate=False, log_speedup=False)
    token_ids, stats = decoder.decode_step(PROMPT, 40, quiet)
    assert token_ids == plain
    assert not {"acceptance_rate", "speedup"} & set(stats)
    decoder.decode_step(PROMPT, 1, GREEDY)


def test_another_depth_and_tree_need_no_other_setup_and_change_no_text(
    decoder: SpeculativeDecoder, plain: list[int]
) -> None:
    six = replace(GREEDY, adaptive_depth=False, num_speculative_tokens=6)
    tree = replace(six, tree_strategy="tree", tree_width=2)
    assert decoder.decode_step(PROMPT, 40, tree)[0] == plain
    with pytest.raises(ValueError, match="call setup"):
        decoder.decode_step(PROMPT, 4, replace(GREEDY, draft_strategy="nasd"))
    decoder.decode_step(PROMPT, 1, GREEDY)


def test_the_depth_follows_the_rate_within_its_bounds() -> None:
    decoder = SpeculativeDecoder(SMALL)
    decoder.setup(TARGET, GREEDY)
    assert decoder.adjust_speculative_depth(0.75) == 4
    assert [decoder.adjust_speculative_depth(1.0) for _ in range(6)] == [5, 6, 7, 8, 8, 8]
    depths = [decoder.adjust_speculative_depth(0.0) for _ in range(16)]
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] == 2
    with pytest.raises(ValueError, match="acceptance_rate"):
        decoder.adjust_speculative_depth(1.5)


def test_a_text_that_fails_raises_its_error_and_others_are_written_after_it(
    decoder: SpeculativeDecoder, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        raise RuntimeError("told to fail")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", forward)
        with pytest.raises(RequestFailedError, match="told to fail"):
            decoder.decode_step(PROMPT, 40)
    assert decoder.decode_step(PROMPT, 40)[0] == plain


def test_what_cannot_run_is_refused(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(RuntimeError, match="setup"):
        SpeculativeDecoder().decode_step(PROMPT, 4)
    with pytest.raises(RequestError, match="no tokens"):
        decoder.decode_step([], 4)
    with pytest.raises(RequestError, match="max_tokens"):
        decoder.decode_step(PROMPT, 0)


def test_nothing_of_an_interrupted_text_comes_up_in_the_next(
    decoder: SpeculativeDecoder, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, num_left = ModelRunner.forward, 4

    def interrupted(*arguments: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise KeyboardInterrupt
        return forward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.decode_step([7, *PROMPT], 40)
    assert decoder.decode_step(PROMPT, 40)[0] == plain


def test_the_depth_told_is_the_one_of_the_drafts(decoder: SpeculativeDecoder) -> None:
    fixed = replace(GREEDY, adaptive_depth=False, num_speculative_tokens=12)
    assert decoder.decode_step(PROMPT, 4, fixed)[1]["speculative_depth"] == 12
    decoder.decode_step(PROMPT, 1, GREEDY)
