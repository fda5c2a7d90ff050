"""Random schedules: whatever comes, goes, waits and is thrown out, the text is the same."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from engine.request.params import PLAIN, GenerationRequest
from worlds.engine_harness import TINY_VOCAB, Driver, Setup, TinyTarget, request, traces_of
from worlds.lanes import examples
from worlds.schedules import Schedule, Totals, longest_text, play, schedules
from worlds.scripted_target import ScriptedTarget

pytestmark = pytest.mark.slow

VOCAB = 8
TARGET = ScriptedTarget(VOCAB)
TEXTS = [[first, *TARGET.stream(request("text", [first, 5]), (), 26)[0]] for first in range(3)]
NUM_SCHEDULES = examples(400)
NUM_MODEL_SCHEDULES = examples(50)
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])


def expect_stream(driver: Driver, each: GenerationRequest, text: list[int], reason: str) -> None:
    finish = driver.finishes[each.request_id]
    emitted = driver.token_ids[each.request_id]
    if finish.reason == "abort":
        assert emitted == text[: len(emitted)]
    else:
        assert (emitted, finish.reason) == (text, reason)
    assert finish.num_output_tokens == len(emitted)


def expect_account(driver: Driver, each: GenerationRequest) -> None:
    finish = driver.finishes[each.request_id]
    account = finish.speculative
    assert sum(account.acceptance_histogram) == account.num_steps
    assert account.num_accepted_tokens <= account.num_draft_tokens
    assert account.num_failed_drafts == 0
    drafted = driver.drafted[each.request_id]
    assert len(drafted) == account.num_emitted_tokens
    assert sum(drafted) <= account.num_accepted_tokens
    if finish.reason == "abort":
        assert account.num_emitted_tokens == account.num_accepted_tokens + account.num_steps
    if each.sampling.prompt_logprobs is not None and account.num_steps:
        (told,) = driver.prompt_logprobs[each.request_id]
        assert [told[0], *(t and t.token_id for t in told[1:])] == [
            None,
            *each.prompt_token_ids[1:],
        ]


@pytest.mark.hypothesis
def test_texts_survive_any_schedule() -> None:
    totals = Totals()

    @settings(PATIENT, max_examples=NUM_SCHEDULES)
    @given(schedules(TEXTS))
    def run(schedule: Schedule) -> None:
        core = TARGET.core(schedule.setup)
        driver = play(core, schedule)
        for arrival in schedule.arrivals:
            each = arrival.request
            text, reason = TARGET.stream(
                each, schedule.setup.eos_token_ids, longest_text(schedule.setup)
            )
            expect_stream(driver, each, text, reason)
            expect_account(driver, each)
        assert traces_of(core, driver.finishes) == []
        totals.add(driver)

    run()
    assert totals.num_accepted > NUM_SCHEDULES
    assert totals.num_rejected > NUM_SCHEDULES
    assert totals.num_preemptions > NUM_SCHEDULES // 4
    assert totals.num_cached_tokens > NUM_SCHEDULES // 2
    assert totals.num_aborted > NUM_SCHEDULES // 4
    assert totals.num_gamma_changes > NUM_SCHEDULES
    assert totals.reasons >= {"no_kv", "no_match", "policy", "client_cap", "overload"}


@pytest.mark.hypothesis
def test_a_real_models_texts_survive_any_schedule(tiny_target: TinyTarget) -> None:
    rng = random.Random(0)
    circles = [[8 * circle + step % 8 for step in range(20)] for circle in range(3)]
    texts = [circle + [rng.randrange(TINY_VOCAB) for _ in range(3)] + circle for circle in circles]
    totals = Totals()

    @cache
    def plain(key: str) -> tuple[list[int], str]:
        each, setup = asked[key]
        alone = Setup(max_model_len=longest_text(setup), eos_token_ids=setup.eos_token_ids)
        driver = Driver(tiny_target.core(alone)).run(
            replace(each, request_id="plain", speculative=PLAIN, priority=0, cache_salt="")
        )
        return driver.token_ids["plain"], driver.finishes["plain"].reason

    asked: dict[str, tuple[GenerationRequest, Setup]] = {}

    @settings(PATIENT, max_examples=NUM_MODEL_SCHEDULES)
    @given(schedules(texts))
    def run(schedule: Schedule) -> None:
        core = tiny_target.core(schedule.setup)
        driver = play(core, schedule)
        for arrival in schedule.arrivals:
            each, setup = arrival.request, schedule.setup
            key = repr(
                (each.prompt_token_ids, each.sampling, longest_text(setup), setup.eos_token_ids)
            )
            asked[key] = each, setup
            text, reason = plain(key)
            expect_stream(driver, each, text, reason)
            expect_account(driver, each)
        assert traces_of(core, driver.finishes) == []
        totals.add(driver)

    run()
    # What fifty random schedules hold varies much: 65 refused drafts and ten preemptions were seen, and
    # several times as many. That there are some is enough.
    assert totals.num_accepted > 0
    assert totals.num_rejected > 0
    assert totals.num_preemptions > 0
