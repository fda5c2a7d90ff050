"""Promise 4: what else a request asks of its sampling holds under drafting, to the token.

Penalties, biases, bad words and ``min_tokens`` depend on the path to a row; stops and lengths cut
runs of accepted drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.request.events import TokenLogprobs
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import Driver, Setup, TinyTarget, circle_prompt, drafting, request

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
PROMPT = circle_prompt(3)
CIRCLE = [8 + step % 8 for step in range(19)]
"""The text is in the prompt already, so that a whole run of drafts comes true at once."""
SHORT_CIRCLE = circle_prompt(7)
"""Leads to a text of three tokens in turn."""
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
PARAMS = {
    "presence": replace(GREEDY, presence_penalty=1.5),
    "frequency": replace(GREEDY, frequency_penalty=0.7),
    "repetition": replace(GREEDY, repetition_penalty=1.3),
    "all_penalties": replace(
        SAMPLED, presence_penalty=0.4, frequency_penalty=-0.3, repetition_penalty=0.8
    ),
    "top_k": replace(SAMPLED, top_k=3),
    "min_p": replace(SAMPLED, min_p=0.2),
    "top_k_top_p_min_p": replace(SAMPLED, temperature=1.3, top_k=9, top_p=0.8, min_p=0.02),
    "top_n_sigma": replace(SAMPLED, top_p=0.95, further={"top_n_sigma": 1.5}),
    "logit_bias": replace(GREEDY, logit_bias={13: -100.0, 46: 4.0, 35: -2.5}),
    "allowed": replace(
        SAMPLED, further={"allowed_token_ids": (9, 10, 11, 12, 14, 15, 35, 36, 40, 46)}
    ),
    "bad_token": replace(GREEDY, bad_words_token_ids=((14,), (36,))),
    "bad_sequence": replace(GREEDY, bad_words_token_ids=((10, 11), (13, 14, 15), (36, 37))),
    "second_choice": replace(SAMPLED, choice_index=1),
}
SPECULATIONS = [
    drafting("ngram", num_tokens=8),
    drafting("ngram", num_tokens=16, width=3, ngram_min=1),
    drafting("nasd_one_level", num_tokens=5, n=2),
    drafting("nasd", num_tokens=12, width=4, filler_top_k=3),
    drafting("nasd", num_tokens=6, stop_if_unknown=False),
    drafting("nasd", "goodput", width=2),
    drafting("stand", num_tokens=12, width=3, share=True),
    drafting("recycling", num_tokens=12, width=3, share=True),
    drafting("lookahead", num_tokens=48, window=5, guesses=5),
]


def variants(sampling: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[GenerationRequest]:
    return [
        request(f"r{index}", prompt, sampling, speculation)
        for index, speculation in enumerate(SPECULATIONS)
    ]


def plain(target: TinyTarget, sampling: SamplingParams, prompt: Sequence[int] = PROMPT) -> Driver:
    return Driver(target.core(Setup())).run(request("plain", prompt, sampling, PLAIN))


def drafted(
    target: TinyTarget,
    sampling: SamplingParams,
    text: Sequence[int],
    reason: str,
    prompt: Sequence[int] = PROMPT,
    **setup: Any,
) -> Driver:
    """Serves all speculations beside each other; every one of them has to write ``text``."""
    driver = Driver(target.core(Setup(**setup))).run(*variants(sampling, prompt))
    for name, each in zip(driver.token_ids, SPECULATIONS, strict=True):
        assert driver.token_ids[name] == text, each
        assert driver.finishes[name].reason == reason
    return driver


def expect_drafts_right_and_wrong(driver: Driver) -> None:
    accounts = [finish.speculative for finish in driver.finishes.values()]
    assert any(account.num_accepted_tokens for account in accounts)
    assert any(account.num_accepted_tokens < account.num_draft_tokens for account in accounts)


@pytest.mark.parametrize("name", PARAMS)
def test_parameter_holds_under_drafting(tiny_target: TinyTarget, name: str) -> None:
    """Over texts that repeat themselves every eight and every three tokens, so that rows deep in a
    draft hang on tokens that only the draft has."""
    sampling = PARAMS[name]
    usual = GREEDY if sampling.temperature == 0 else SAMPLED
    num_changed = 0
    for prompt in (PROMPT, CIRCLE, SHORT_CIRCLE):
        expected = plain(tiny_target, sampling, prompt).token_ids["plain"]
        num_changed += expected != plain(tiny_target, usual, prompt).token_ids["plain"]
        asked = request("r", prompt, sampling)
        assert expected == tiny_target.recomputed(asked, NUM_TOKENS)
        driver = drafted(tiny_target, sampling, expected, "length", prompt)
        expect_drafts_right_and_wrong(driver)
    assert num_changed > 0, "the parameter did nothing"


@pytest.mark.parametrize("sampling", [GREEDY, replace(SAMPLED, presence_penalty=0.5)])
def test_logprobs_are_those_of_the_model(tiny_target: TinyTarget, sampling: SamplingParams) -> None:
    driver = Driver(tiny_target.core(Setup())).run(*variants(replace(sampling, logprobs=4)))
    text = [*PROMPT, *driver.token_ids["r0"]]
    logprobs = tiny_target.logits(text).log_softmax(dim=-1)
    for told in driver.logprobs.values():
        assert [one.token_id for one in told] == text[len(PROMPT) :]
        for position, one in enumerate(told, start=len(PROMPT)):
            expect_logprobs(one, logprobs[position - 1].tolist(), num_top=4)
    expect_drafts_right_and_wrong(driver)


def expect_logprobs(told: TokenLogprobs, logprobs: list[float], num_top: int) -> None:
    assert told.logprob == pytest.approx(logprobs[told.token_id], abs=1e-5)
    assert len(told.top) == num_top
    for (token_id, logprob), best in zip(told.top, sorted(logprobs, reverse=True), strict=False):
        assert logprob == pytest.approx(best, abs=1e-5)
        assert logprob == pytest.approx(logprobs[token_id], abs=1e-5)


def was_cut(driver: Driver, request_id: str) -> bool:
    """Drafts were accepted that lie behind the stop."""
    account = driver.finishes[request_id].speculative
    return account.num_emitted_tokens < account.num_accepted_tokens + account.num_steps - 1


@pytest.mark.parametrize("by", ["stop_token_ids", "eos"])
def test_stop_token_cuts_a_run_of_drafts(tiny_target: TinyTarget, by: str) -> None:
    text = plain(tiny_target, GREEDY, CIRCLE).token_ids["plain"]
    num_cut = 0
    for stop in sorted(set(text)):
        sampling = replace(GREEDY, stop_token_ids=(stop,)) if by == "stop_token_ids" else GREEDY
        eos = (stop,) if by == "eos" else ()
        end = text.index(stop)
        driver = drafted(tiny_target, sampling, text[:end], "stop", CIRCLE, eos_token_ids=eos)
        for name, finish in driver.finishes.items():
            assert (finish.stop_token_id, finish.num_output_tokens) == (stop, end)
            num_cut += was_cut(driver, name)
    assert num_cut > 0


def test_min_tokens_keeps_the_stop_token_away_first(tiny_target: TinyTarget) -> None:
    text = plain(tiny_target, GREEDY).token_ids["plain"]
    sampling = replace(GREEDY, stop_token_ids=(text[3],), min_tokens=9)
    expected = plain(tiny_target, sampling)
    tokens = expected.token_ids["plain"]
    assert text[3] not in tokens[:9]
    assert len(tokens) >= 9
    assert tokens[:3] == text[:3]
    drafted(tiny_target, sampling, tokens, expected.finishes["plain"].reason)


def test_min_tokens_counts_the_drafts_before_a_row(tiny_target: TinyTarget) -> None:
    text = plain(tiny_target, GREEDY, CIRCLE).token_ids["plain"]
    for min_tokens, at in ((2, 3), (4, 4), (4, 6), (6, 7)):
        sampling = replace(GREEDY, stop_token_ids=(text[at],), min_tokens=min_tokens)
        driver = drafted(tiny_target, sampling, text[:at], "stop", CIRCLE)
        assert max(map(sum, driver.drafted.values())) >= min_tokens - 1


def test_lengths_cut_exactly_and_an_ignored_eos_is_text(tiny_target: TinyTarget) -> None:
    text = plain(tiny_target, GREEDY).token_ids["plain"]
    drafted(tiny_target, replace(GREEDY, ignore_eos=True), text, "length", eos_token_ids=(text[5],))
    drafted_last = 0
    for num_tokens in range(1, NUM_TOKENS):
        sampling = replace(GREEDY, max_tokens=num_tokens)
        driver = drafted(tiny_target, sampling, text[:num_tokens], "length")
        drafted_last += num_tokens > 1 and any(each[-2] for each in driver.drafted.values())
    assert drafted_last > 0
    for room in (1, 2, 7):
        drafted(tiny_target, GREEDY, text[:room], "length", max_model_len=len(PROMPT) + room)


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_next_turn_reads_what_drafts_left_in_the_cache(
    tiny_target: TinyTarget, speculation: SpeculativeParams
) -> None:
    """The keys and values of accepted drafts, moved into place, are as good as any."""
    core = tiny_target.core(Setup())
    driver = Driver(core)
    text = circle_prompt(1)
    for turn in itertools.count():
        each = request(f"turn-{turn}", text, replace(SAMPLED, seed=turn), speculation)
        driver.run(each)
        assert driver.token_ids[each.request_id] == tiny_target.recomputed(each, NUM_TOKENS)
        if turn > 0:
            assert driver.finishes[each.request_id].num_cached_tokens >= len(text) - 6
        text = [*text, *driver.token_ids[each.request_id], 7 + turn]
        if len(text) > 100:
            break
    assert any(driver.drafted["turn-1"])
