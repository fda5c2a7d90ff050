"""The step as a whole, on a scripted target: its accounts, its events, and what it does with aborts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafters.base import DraftRequest
from drafters.tree import DraftTree
from engine.core import EngineCore
from engine.request.params import GenerationRequest, SamplingParams
from kvpool.block_pool import BlockPool
from worlds.engine_harness import Driver, Setup, drafting, request
from worlds.fake_drafters import FakeDrafter, foreseeing
from worlds.scripted_target import ScriptedRunner, ScriptedTarget

TARGET = ScriptedTarget(8)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]


def text_of(each: GenerationRequest, longest: int = 256) -> list[int]:
    return TARGET.stream(each, (), longest)[0]


def whole_text() -> list[int]:
    return [*PROMPT, *text_of(request("r", PROMPT, GREEDY))]


def several() -> list[GenerationRequest]:
    return [
        request("ngram", PROMPT, GREEDY, drafting("ngram", num_tokens=4, ngram_min=1)),
        request("tree", PROMPT[:5], GREEDY, drafting("nasd", num_tokens=9, width=3)),
        request("goodput", PROMPT[2:], GREEDY, drafting("nasd_one_level", "goodput", n=2)),
        request("none", PROMPT[1:], GREEDY, drafting("none")),
    ]


# --- accounts ---


def test_step_figures_add_up_to_the_requests_accounts() -> None:
    """And every second belongs to a phase."""
    driver = Driver(TARGET.core(Setup(prefill_chunk=3))).run(*several())
    for stats in driver.stats:
        parts = stats.draft_seconds, stats.forward_seconds, stats.verify_seconds
        assert min(parts) >= 0
        assert stats.step_seconds == pytest.approx(sum(parts) + stats.other_seconds)
        assert stats.baseline_seconds > 0
    for name, drafter in (("ngram", "ngram"), ("tree", "nasd"), ("goodput", "nasd_one_level")):
        account = driver.finishes[name].speculative
        assert account.drafter == drafter
        assert account.num_draft_tokens > account.num_accepted_tokens > 0
        steps = [stats.by_drafter[drafter] for stats in driver.stats if drafter in stats.by_drafter]
        assert sum(step.num_draft_tokens for step in steps) == account.num_draft_tokens
        assert sum(step.num_accepted_tokens for step in steps) == account.num_accepted_tokens
        assert sum(step.num_emitted_tokens for step in steps) == account.num_emitted_tokens
        gammas = [gamma for step in steps for gamma in step.gammas.elements()]
        assert len(gammas) == account.num_steps
        assert sum(gammas) == account.num_draft_tokens
        by_position = [0] * 20
        for step in steps:
            for position, count in enumerate(step.accepted_per_position):
                by_position[position] += count
        assert tuple(filter(None, by_position)) == account.accepted_per_position


def test_accounts_hold_their_identities() -> None:
    driver = Driver(TARGET.core(Setup(max_num_seqs=2, num_blocks=30)))
    driver.submit(*several())
    driver.step()
    stats = driver.stats[-1]
    assert (stats.num_running, stats.num_waiting) == (2, 2)
    assert sum(stats.blocks.values()) == 30
    assert stats.blocks == driver.core.pool.counts()
    driver.run()
    stats = driver.stats[-1]
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.blocks["committed"] == stats.blocks["draft"] == 0
    for name, finish in driver.finishes.items():
        account = finish.speculative
        # Nothing was trimmed, so every step emits its accepted drafts and one token more.
        assert account.num_emitted_tokens == account.num_accepted_tokens + account.num_steps
        assert account.num_emitted_tokens == finish.num_output_tokens == GREEDY.max_tokens
        assert sum(driver.drafted[name]) == account.num_accepted_tokens
        assert driver.num_draft_tokens[name] == account.num_draft_tokens
        assert driver.draft_seconds[name] == account.draft_seconds
        assert driver.verify_seconds[name] == account.verify_seconds > 0
        assert account.num_gamma_changes == len(account.gamma_changes)
    assert driver.draft_seconds["ngram"] > driver.draft_seconds["none"] == 0


def test_prompt_tokens_exclude_cached_ones_and_include_recomputed_ones() -> None:
    driver = Driver(TARGET.core(Setup(max_num_seqs=1)))
    driver.run(request("first", PROMPT, GREEDY))
    num_before = sum(stats.num_prompt_tokens for stats in driver.stats)
    assert num_before == len(PROMPT)
    driver.submit(request("second", [*PROMPT, 1], GREEDY))
    driver.step()
    assert driver.stats[-1].num_prompt_tokens == 1
    assert driver.stats[-1].prefix_cache_hits == len(PROMPT)
    driver.submit(request("important", [7, 7], GREEDY, priority=-1))
    driver.step()
    assert driver.stats[-1].num_preemptions == 1
    assert driver.stats[-1].num_prompt_tokens == 2
    driver.run()
    assert driver.finishes["second"].num_preemptions == 1
    # What comes back is no new query, and its own blocks are no hit.
    assert sum(stats.prefix_cache_queries for stats in driver.stats) == 2 * len(PROMPT) + 3
    assert sum(stats.prefix_cache_hits for stats in driver.stats) == len(PROMPT)


@pytest.mark.parametrize("arrival_time", [0.0, 1e-9])
def test_times_of_a_request_are_in_order(arrival_time: float) -> None:
    """One that does not say when it came has never waited."""
    each = replace(several()[0], arrival_time=arrival_time)
    finish = Driver(TARGET.core(Setup())).run(each).finishes["ngram"]
    times = finish
    assert (times.arrival_time == arrival_time) == (arrival_time > 0)
    assert (times.queue_seconds > 0) == (arrival_time > 0)
    assert times.queue_seconds <= times.time_to_first_token_seconds <= times.e2e_seconds


# --- drafts and blocks ---


def wide(ask: DraftRequest) -> DraftTree:
    """Every token under the anchor: as many nodes as are allowed, one level deep."""
    num_nodes = min(ask.max_nodes, TARGET.vocab_size)
    return DraftTree(list(range(num_nodes)), [-1] * num_nodes, [0] * num_nodes)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_drafts_shrink_to_the_blocks_there_are_before_anybody_is_preempted(names: str) -> None:
    """The texts fit exactly; trees beside them do not."""
    setup = Setup(
        num_blocks=7 * len(names), block_size=4, drafters={"fake": FakeDrafter(propose=wide)}
    )
    requests = [
        request(name, PROMPT, GREEDY, drafting("fake", num_tokens=8), cache_salt=name)
        for name in names
    ]
    driver = Driver(TARGET.core(setup)).run(*requests)
    assert sum(stats.num_preemptions for stats in driver.stats) == 0
    reasons = set()
    for each in requests:
        assert driver.token_ids[each.request_id] == text_of(each)
        account = driver.finishes[each.request_id].speculative
        assert account.num_draft_tokens < 8 * account.num_steps
        assert account.num_accepted_tokens > 0
        reasons |= {change.reason for change in account.gamma_changes}
    assert "no_kv" in reasons


def test_a_request_holds_drafter_state_from_its_admission_to_its_end() -> None:
    """Not while it waits; and through a preemption, after which it waits again."""
    fake = FakeDrafter(propose=foreseeing(whole_text()))
    driver = Driver(TARGET.core(Setup(max_num_seqs=1, drafters={"fake": fake})))
    first, second, third = (
        request(name, PROMPT, GREEDY, drafting("fake", num_tokens=2)) for name in "abc"
    )
    driver.submit(first, second, third)
    assert fake.opened == []
    driver.step()
    assert fake.opened == ["a"]
    driver.submit(request("important", [7, 7], GREEDY, drafting("fake"), priority=-1))
    driver.step()
    assert driver.stats[-1].num_preemptions == 1
    assert (fake.opened, fake.closed) == (["a", "important"], [])
    driver.core.abort("c")
    driver.run()
    assert fake.opened == ["a", "important", "b"]
    assert fake.closed == ["important", "a", "b"]
    assert driver.finishes["c"].reason == "abort"
    assert all(driver.token_ids[each.request_id] == text_of(each) for each in (first, second))


def test_row_budget_bounds_drafts() -> None:
    setup = Setup(max_num_seqs=4, max_num_batched_tokens=10)
    driver = Driver(TARGET.core(setup)).run(*several())
    assert max(stats.num_rows for stats in driver.stats) == 10
    assert all(driver.token_ids[each.request_id] == text_of(each) for each in several())


def test_a_perfect_drafter_saves_its_steps() -> None:
    fake = FakeDrafter(propose=foreseeing(whole_text()))
    setup = Setup(drafters={"fake": fake})
    each = request("r", PROMPT, GREEDY, drafting("fake", num_tokens=4))
    driver = Driver(TARGET.core(setup)).run(each)
    assert driver.token_ids["r"] == text_of(each)
    account = driver.finishes["r"].speculative
    assert account.num_steps == 4
    assert account.acceptance_histogram == (0, 0, 0, 0, 4)
    assert account.acceptance_rate == 1.0
    assert driver.drafted["r"] == [True, True, True, True, False] * 4


# --- commands ---


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_frees_at_once_and_accounts(num_steps: int) -> None:
    """Waiting, in the middle of its prompt, and while it writes."""
    core = TARGET.core(Setup(prefill_chunk=5))
    driver = Driver(core)
    driver.submit(several()[0])
    for _ in range(num_steps):
        driver.step()
    core.abort("ngram")
    assert core.pool.counts()["committed"] == 0
    assert not core.has_work
    driver.step()
    finish = driver.finishes["ngram"]
    assert finish.reason == "abort"
    assert finish.num_output_tokens == len(driver.token_ids["ngram"])
    assert finish.speculative.num_emitted_tokens == len(driver.token_ids["ngram"])
    assert driver.token_ids["ngram"] == text_of(several()[0])[: finish.num_output_tokens]
    assert bool(driver.token_ids["ngram"]) == (num_steps >= 2)
    core.abort("ngram")
    core.abort("never seen")
    result = core.step()
    assert (result.events, result.stats) == ([], None)
    driver = Driver(core)
    driver.submit(*several())
    for _ in range(num_steps):
        driver.step()
    core.abort_all()
    driver.step()
    assert {finish.reason for finish in driver.finishes.values()} == {"abort"}
    assert set(driver.finishes) == {each.request_id for each in several()}
    assert not core.has_work


class CorruptPool(BlockPool):
    def check_integrity(self) -> None:
        raise AssertionError("found")


@pytest.mark.parametrize("checks", [False, True])
def test_integrity_is_checked_at_every_step_where_asked_for(checks: bool) -> None:
    setup = Setup(check_integrity=checks)
    sound = TARGET.core(setup)
    core = EngineCore(
        ScriptedRunner(TARGET, setup.num_blocks, setup.block_size),
        CorruptPool(setup.num_blocks, setup.block_size),
        sound.scheduler,
        sound.speculation,
        sound.cost,
        sound.limits,
        checks,
    )
    if checks:
        with pytest.raises(AssertionError, match="found"):
            core.step()
    else:
        core.step()
