"""Promise 1 under any schedule: whatever comes, goes, waits and is thrown out, whoever drafts, under
whatever policy and sampling, at an engine of whatever size, the text is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from drafters.registry import build_drafters
from engine.core import EngineCore
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import TINY_VOCAB, DictatedCost, Driver, Setup, request, traces_of
from worlds.every_drafter import DRAFTERS, EveryDrafterTarget
from worlds.lanes import examples
from worlds.scripted_target import ScriptedTarget

pytestmark = [pytest.mark.slow, pytest.mark.hypothesis]

Text = Sequence[int]
Plain = Callable[[GenerationRequest, Setup], tuple[list[int], str]]
USUAL = SamplingParams(temperature=0.0)
SAMPLINGS = (
    *[USUAL] * 6,
    replace(USUAL, prompt_logprobs=0),
    replace(USUAL, stop_token_ids=(2, 5)),
    replace(USUAL, ignore_eos=True),
    replace(USUAL, min_tokens=4, stop_token_ids=(3,)),
    replace(USUAL, frequency_penalty=0.4, repetition_penalty=1.1),
    replace(USUAL, temperature=0.8, logprobs=0),
)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ngram": [{"ngram_min": 1}],
    "nasd": [{}, {"filler_top_k": 2}, {"stop_if_unknown": False}],
    "lookahead": [{"window": 2, "ngram": 3, "guesses": 2}],  # fits into eight nodes
    # Small draft models are unsure of much.
    **dict.fromkeys({*DRAFTERS} - {*build_drafters(), "medusa"}, [{"min_confidence": 0.02}]),
}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    max_num_seqs = draw(st.integers(1, 5))
    row_seconds = draw(st.sampled_from([0.001, 0.05, 0.5]))
    return Setup(
        num_blocks=draw(st.integers(5, 24)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        prefill_chunk=draw(st.sampled_from([1, 3, 8, 64])),
        prefix_cache=draw(st.booleans()),
        max_num_nodes=draw(st.sampled_from([2, 64])),
        max_model_len=48,
        eos_token_ids=draw(st.sampled_from([(), (1,)])),
        cost=DictatedCost(row_seconds, {"nasd": draw(st.sampled_from([0.0, 0.0, 2.0]))}),
        runs_ahead=draw(st.booleans()),
    )


@st.composite
def speculations(draw: st.DrawFn, drafters: Sequence[str]) -> SpeculativeParams:
    drafter = draw(st.sampled_from(drafters))
    num_tokens = draw(st.sampled_from([0, 1, 3, 8]))
    return SpeculativeParams(
        draft_strategy=drafter,
        adaptive_depth=draw(st.sampled_from(["fixed", "target_rate", "goodput"])),
        num_speculative_tokens=num_tokens,
        min_speculative_tokens=min(draw(st.integers(0, 2)), num_tokens),
        max_speculative_tokens=max(num_tokens, 6),
        target_acceptance_rate=0.4,
        tree_strategy="tree",
        tree_width=draw(st.sampled_from([1, 3])),
        tree_depth=8,
        verification="match",
        options=draw(st.sampled_from(OPTIONS.get(drafter, [{}]))),
    )


@st.composite
def subjects(draw: st.DrawFn, texts: Sequence[Text], drafters: Sequence[str]) -> GenerationRequest:
    """Prompts are beginnings of ``texts``, so that requests share prefixes."""
    text, prompt_len = draw(st.sampled_from(texts)), draw(st.integers(1, 26))
    sampling = draw(st.sampled_from(SAMPLINGS))
    return request(
        "",
        text[:prompt_len],
        replace(sampling, max_tokens=draw(st.integers(1, 30)), seed=prompt_len % 3),
        draw(speculations(drafters)),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        cache_salt=draw(st.sampled_from(["", "", "", "tenant"])),
        prediction=text[prompt_len:],
    )


def longest_text(setup: Setup) -> int:
    return min(setup.max_model_len, setup.num_blocks * setup.block_size)


@dataclass
class Totals:
    """Counts over all schedules that must not stay 0: without such events the schedules show little."""

    num_accepted: int = 0
    num_rejected: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_aborted: int = 0
    num_gamma_changes: int = 0
    reasons: set[str] = field(default_factory=set)
    drafters: set[str] = field(default_factory=set)

    def add(self, driver: Driver) -> None:
        for finish in driver.finishes.values():
            account = finish.speculative
            self.num_accepted += account.num_accepted_tokens
            self.num_rejected += account.num_draft_tokens - account.num_accepted_tokens
            self.num_preemptions += finish.num_preemptions
            self.num_cached_tokens += finish.num_cached_tokens
            self.num_aborted += finish.reason == "abort"
            self.num_gamma_changes += account.num_gamma_changes
            self.reasons |= {change.reason for change in account.gamma_changes}
            self.drafters |= {account.drafter} if account.num_draft_tokens else set()


class WatchedDriver(Driver):
    """Looks at sizes of steps, too, and that tenants share no block."""

    def __init__(self, core: EngineCore, setup: Setup) -> None:
        super().__init__(core)
        self._setup = setup

    def step(self) -> None:
        super().step()
        running = self.core.scheduler.running
        assert len(running) <= self._setup.max_num_seqs
        sizes = [stats.num_rows for stats in self.stats[-1:]]
        assert max(sizes, default=0) <= self._setup.max_num_batched_tokens
        blocks_of: dict[str, set[int]] = {}
        for each in running:
            blocks = self.core.pool.block_table(each.request_id)
            blocks_of.setdefault(each.params.cache_salt, set()).update(blocks)
        assert sum(map(len, blocks_of.values())) == len(set().union(*blocks_of.values()))


def schedules(
    target: Any, texts: Sequence[Text], drafters: Sequence[str], plain: Plain, totals: Totals
) -> type[RuleBasedStateMachine]:
    """Builds a machine that serves any schedule on the target. ``plain``: the stream and the reason that
    a request has to end with on an engine of these sizes."""

    class Schedule(RuleBasedStateMachine):
        driver: Driver
        setup: Setup
        asked: dict[str, GenerationRequest]

        @initialize(setup=setups())
        def build(self, setup: Setup) -> None:
            self.setup = setup
            self.driver = WatchedDriver(target.core(setup), setup)
            self.asked = {}

        @property
        def open(self) -> list[str]:
            return [name for name in self.asked if name not in self.driver.finishes]

        @rule(found=st.lists(subjects(texts, drafters), min_size=1, max_size=3))
        def submit(self, found: list[GenerationRequest]) -> None:
            for each in found:
                prompt = each.prompt_token_ids[: longest_text(self.setup) - 1]
                name = f"request-{len(self.asked)}"
                self.asked[name] = replace(each, request_id=name, prompt_token_ids=prompt)
                self.driver.submit(self.asked[name])

        @rule(count=st.integers(1, 6))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.driver.step()

        @precondition(lambda self: self.open)
        @rule(number=st.integers(0, 20))
        def abort(self, number: int) -> None:
            self.driver.core.abort(self.open[number % len(self.open)])

        def teardown(self) -> None:
            if not hasattr(self, "driver"):  # Not even an engine was drawn.
                return
            self.driver.step()  # tells of the last abort, even if nothing else is left
            self.driver.run()
            expect_the_end(self.driver, self.asked)
            for name, each in self.asked.items():
                expect_stream(self.driver, name, *plain(each, self.setup))
                expect_account(self.driver, each)
            totals.add(self.driver)

    return Schedule


def expect_the_end(driver: Driver, names: Iterable[str]) -> None:
    core, counts = driver.core, driver.core.pool.counts()
    assert driver.finishes.keys() == set(names)
    assert [*core.scheduler.running, *core.scheduler.waiting] == []
    assert counts["free"] + counts["cached"] == sum(counts.values())
    assert traces_of(core, driver.finishes) == []


def expect_stream(driver: Driver, name: str, text: list[int], reason: str) -> None:
    finish, emitted = driver.finishes[name], driver.token_ids[name]
    if finish.reason == "abort":
        assert emitted == text[: len(emitted)]
    else:
        assert (emitted, finish.reason) == (text, reason)
    assert finish.num_output_tokens == len(emitted)


def expect_account(driver: Driver, each: GenerationRequest) -> None:
    finish = driver.finishes[each.request_id]
    account, drafted = finish.speculative, driver.drafted[each.request_id]
    assert sum(account.acceptance_histogram) == account.num_steps
    assert account.num_failed_drafts == 0
    assert sum(drafted) <= account.num_accepted_tokens <= account.num_draft_tokens
    assert len(drafted) == account.num_emitted_tokens
    if finish.reason == "abort":
        assert account.num_emitted_tokens == account.num_accepted_tokens + account.num_steps
    if each.sampling.prompt_logprobs is not None and account.num_steps:
        (told,) = driver.prompt_logprobs[each.request_id]
        assert [t and t.token_id for t in told] == [None, *each.prompt_token_ids[1:]]


def search(machine: type[RuleBasedStateMachine], num_examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=12,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_texts_survive_any_schedule() -> None:
    target, totals, num_examples = ScriptedTarget(8), Totals(), examples(300)
    texts = [[at, *target.stream(request("t", [at, 5]), (), 26)[0]] for at in range(3)]

    def plain(each: GenerationRequest, setup: Setup) -> tuple[list[int], str]:
        return target.stream(each, setup.eos_token_ids, longest_text(setup))

    # Copying ones and those that learn, most of all those whose drafts come true.
    drafters = [*["ngram", "nasd"] * 3, *sorted(build_drafters())]
    search(schedules(target, texts, drafters, plain, totals), num_examples)
    assert totals.num_accepted > num_examples
    assert totals.num_rejected > num_examples
    assert totals.num_preemptions > num_examples // 4
    assert totals.num_cached_tokens > num_examples // 2
    assert totals.num_aborted > num_examples // 4
    assert totals.num_gamma_changes > num_examples
    assert totals.reasons >= {"no_kv", "no_match", "policy", "client_cap", "overload"}


def test_a_real_models_texts_survive_any_schedule(tmp_path: Path) -> None:
    target, totals = EveryDrafterTarget(tmp_path), Totals()
    rng = random.Random(0)
    circles = [[8 * circle + step % 8 for step in range(20)] for circle in range(3)]
    texts = [circle + [rng.randrange(TINY_VOCAB) for _ in range(3)] + circle for circle in circles]

    @cache
    def stream(
        prompt: tuple[int, ...], sampling: str, eos: tuple[int, ...], longest: int
    ) -> tuple[list[int], str]:
        each = request("plain", prompt, known[sampling], PLAIN)
        driver = Driver(target.core(Setup(max_model_len=longest, eos_token_ids=eos))).run(each)
        return driver.token_ids["plain"], driver.finishes["plain"].reason

    known: dict[str, SamplingParams] = {}

    def plain(each: GenerationRequest, setup: Setup) -> tuple[list[int], str]:
        known[repr(each.sampling)] = each.sampling
        found = setup.eos_token_ids, longest_text(setup)
        return stream(each.prompt_token_ids, repr(each.sampling), *found)

    search(schedules(target, texts, DRAFTERS, plain, totals), examples(40))
    # What so few random schedules hold varies much. That there are some is enough.
    assert min(totals.num_accepted, totals.num_rejected, totals.num_preemptions) > 0
    assert len(totals.drafters) > 8
