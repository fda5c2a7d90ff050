"""Steps that are launched before the tokens of the one before are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import pytest
import torch

from drafters.registry import build_drafters
from engine.attention import triton
from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import ForwardOutput, InputBatch, RequestRows, build_batch
from engine.capture.replays import DeviceGraphs, GraphSizes
from engine.core import EngineCore, Runner
from engine.model.runner import ModelRunner
from engine.request.events import ErrorEvent, TokenEvent, TokenLogprobs
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from worlds.device_world import WatchedDriver
from worlds.engine_harness import (
    DictatedCost,
    Driver,
    Setup,
    TinyTarget,
    circle_prompt,
    drafting,
    request,
    traces_of,
)
from worlds.graph_maker import ReplayingMaker
from worlds.interpreted import ON_CPU, patching_once

AHEAD = Setup(runs_ahead=True, check_integrity=True)
USUAL = SamplingParams(20, temperature=0.0, ignore_eos=True)


class TritonTarget(TinyTarget):
    """On attention that takes rows of which only the device knows where they lie."""

    def _runner(self, setup: Setup) -> ModelRunner:
        needs = AttentionNeeds.of(self._model, self._shapes, "exact", setup.block_size)
        return ModelRunner(self._model, build_attention(needs, setup.num_blocks, "triton"))


class Watched:
    """A runner that notes which steps took their tokens from the device, and what had been told by the
    time when they were launched. The ``broken``-th forward raises."""

    def __init__(self, runner: Runner, broken: int = -1) -> None:
        self._runner, self._broken = runner, broken
        self.are_ahead: list[bool] = []
        self.sizes: list[int] = []

    def forward(self, batch: InputBatch) -> ForwardOutput:
        self.are_ahead.append(batch.chosen is not None)
        self.sizes.append(batch.num_rows)
        if len(self.are_ahead) == self._broken:
            raise RuntimeError("the device has no room")
        return self._runner.forward(batch)

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        self._runner.move(source_slots, target_slots)


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget()


def watched(target: TinyTarget, setup: Setup, broken: int = -1) -> tuple[EngineCore, Watched]:
    core = target.core(setup)
    runner = core.runner = Watched(core.runner, broken)
    return core, runner


def asked(
    number: int, sampling: SamplingParams = USUAL, speculative: SpeculativeParams = PLAIN
) -> GenerationRequest:
    return request(f"r{number}", circle_prompt(number)[: 9 + number], sampling, speculative)


class Near(float):
    """Torch's own products give a row other bits beside more rows, and padding goes by time."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and isclose(self, other, abs_tol=1e-4)

    __hash__ = float.__hash__


def texts(driver: Driver) -> dict[str, tuple[list[int], str, list[Any]]]:
    def likely(told: TokenLogprobs) -> list[tuple[int, Near]]:
        pairs = (told.token_id, told.logprob), *told.top, *told.named
        return [(token_id, Near(logprob)) for token_id, logprob in pairs]

    return {
        name: (driver.token_ids[name], each.reason, [*map(likely, driver.logprobs[name])])
        for name, each in driver.finishes.items()
    }


def run(core: EngineCore, *requests: GenerationRequest) -> Driver:
    driver = Driver(core)
    driver.submit(*requests)
    driver.run()
    assert traces_of(core, driver.finishes) == []
    return driver


@pytest.mark.parametrize(
    "sampling",
    [
        USUAL,
        replace(USUAL, temperature=0.9, seed=3),
        replace(USUAL, temperature=1.2, top_p=0.8, top_k=20, seed=4),
        replace(USUAL, temperature=1.0, seed=5, stop_token_ids=tuple(range(0, 64, 3))),
        replace(USUAL, seed=6, temperature=0.7, min_p=0.05, max_tokens=7),
        replace(USUAL, seed=7, temperature=0.8, logprobs=2, logprob_token_ids=(5,)),
    ],
)
def test_texts_are_those_of_steps_that_wait(target: TinyTarget, sampling: SamplingParams) -> None:
    requests = [
        asked(number, replace(sampling, max_tokens=sampling.max_tokens + 3 * number))
        for number in range(4)
    ]
    expected = texts(run(target.core(Setup()), *requests))
    core, runner = watched(target, AHEAD)
    assert texts(run(core, *requests)) == expected
    assert sum(runner.are_ahead) > len(runner.are_ahead) // 2


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_told(target: TinyTarget) -> None:
    core, runner = watched(target, AHEAD)
    driver = Driver(core)
    driver.submit(asked(0))
    driver.step()
    assert (len(driver.token_ids["r0"]), runner.are_ahead) == (1, [False, True])
    driver.step()
    assert (len(driver.token_ids["r0"]), runner.are_ahead) == (2, [False, True, True])


def test_no_row_is_launched_for_a_token_that_a_length_forbids(target: TinyTarget) -> None:
    core, runner = watched(target, AHEAD)
    driver = run(
        core, asked(0, replace(USUAL, max_tokens=3)), asked(1, replace(USUAL, max_tokens=5))
    )
    assert [len(each) for each in driver.token_ids.values()] == [3, 5]
    assert runner.sizes[1:] == [2, 2, 1, 1]


def test_a_name_that_comes_again_gets_nothing_of_the_row_under_way(target: TinyTarget) -> None:
    core, _ = watched(target, AHEAD)
    for each in (asked(0), asked(1)):
        core.submit(core.prepare(each))
    core.step()
    core.abort("r0")
    core.take_result()
    again = replace(asked(2), request_id="r0")
    core.submit(core.prepare(again))
    told: list[int] = []
    while core.has_work:
        for event in core.step().events:
            assert isinstance(event, TokenEvent)
            told += event.token_ids if event.request_id == "r0" else ()
    assert told == run(target.core(Setup()), again).token_ids["r0"]


def test_who_waits_for_a_free_seat_is_not_kept_waiting(target: TinyTarget) -> None:
    core, runner = watched(target, AHEAD)
    driver = Driver(core)
    driver.submit(asked(0))
    for _ in range(3):
        driver.step()
    driver.submit(asked(1))
    driver.step()  # reads the step that is under way, and launches none before the newcomer's prompt
    driver.step()
    assert len(driver.token_ids["r1"]) == 1
    assert runner.are_ahead == [False, True, True, True, False, True]


@pytest.mark.parametrize(
    "sampling",
    [replace(USUAL, frequency_penalty=0.5), replace(USUAL, min_tokens=6, stop_token_ids=(3,))],
)
def test_a_request_that_needs_the_host_between_steps_waits_for_it(
    target: TinyTarget, sampling: SamplingParams
) -> None:
    core, runner = watched(target, AHEAD)
    driver = run(core, asked(0, sampling), asked(1))
    assert not any(runner.are_ahead[:19])
    assert texts(driver) == texts(run(target.core(Setup()), asked(0, sampling), asked(1)))


def test_commands_are_heard_before_a_step_is_planned_within_another(target: TinyTarget) -> None:
    core, runner = watched(target, AHEAD)
    driver = Driver(core)
    driver.submit(asked(0, replace(USUAL, frequency_penalty=0.5)), asked(1))
    coming = [lambda: driver.submit(asked(2)), lambda: core.abort("r1")]
    core.listen = lambda: coming.pop(0)() if coming else None
    driver.step()
    assert runner.sizes[1:] == [1 + len(asked(2).prompt_token_ids)]
    assert (len(driver.token_ids["r1"]), driver.finishes["r1"].reason) == (1, "abort")


def test_a_step_is_told_while_the_next_one_is_under_way(target: TinyTarget) -> None:
    core, runner = watched(target, AHEAD)
    driver = Driver(core)
    penalised = replace(USUAL, frequency_penalty=0.5)
    driver.submit(asked(0, penalised), asked(1, USUAL, drafting("ngram", "fixed", 3, ngram_min=1)))
    for number in range(1, 6):
        driver.step()
        assert len(driver.token_ids["r0"]) == number
        assert runner.are_ahead == [False] * (number + 1)
    core.abort("r1")  # its drafts are in blocks that are free again
    driver.submit(asked(2))
    driver.run()
    alone = texts(run(target.core(Setup()), asked(0, penalised), asked(2)))
    assert {name: each for name, each in texts(driver).items() if name != "r1"} == alone


def test_what_drafts_waits_and_what_rests_runs_ahead(target: TinyTarget) -> None:
    always = drafting("suffix", "fixed", 3)
    weighed = drafting("suffix", "goodput", 3)
    for speculative, cost, is_ahead in (
        (always, 0.0, False),
        (weighed, 1000.0, True),  # its asking is dear: it rests after the first steps
    ):
        drafters = {**build_drafters()}
        setup = AHEAD.but(cost=DictatedCost(0.05, {"suffix": cost}), drafters=drafters)
        core, runner = watched(target, setup)
        long = replace(USUAL, max_tokens=60)
        driver = run(core, asked(0, long, speculative))
        assert any(runner.are_ahead) == is_ahead
        assert texts(driver) == texts(run(target.core(Setup()), asked(0, long)))


@pytest.mark.parametrize("policy", ["fixed", "target_rate", "goodput"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_texts_drafted_by_ngram_run_ahead(target: TinyTarget, policy: str, block_size: int) -> None:
    copied = drafting("ngram", policy, 5, ngram_min=1)
    long = replace(USUAL, max_tokens=70)
    requests = [
        asked(0, replace(long, stop_token_ids=(11,)), copied),
        asked(1, replace(long, logprobs=1, max_tokens=41), copied),
        asked(2, replace(long, temperature=0.8, seed=1)),
        asked(3, long, drafting("ngram", policy, 2)),
    ]
    setup = Setup(block_size=block_size)
    expected = texts(
        run(target.core(setup), *[replace(each, speculative=PLAIN) for each in requests])
    )
    core, runner = watched(target, AHEAD.but(block_size=block_size))
    driver = run(core, *requests)
    assert texts(driver) == expected
    accounts = [each.speculative for each in driver.finishes.values()]
    assert sum(each.num_accepted_tokens for each in accounts) > 0
    sizes = [
        size for size, is_ahead in zip(runner.sizes, runner.are_ahead, strict=True) if is_ahead
    ]
    if policy != "goodput":  # which grants few
        assert max(sizes) > len(requests)


def test_a_draft_that_the_device_makes_is_accounted_as_the_hosts(target: TinyTarget) -> None:
    copied = drafting("ngram", "fixed", 4)
    one = asked(1, replace(USUAL, max_tokens=80), copied)
    waiting = run(target.core(Setup()), one)
    core, runner = watched(target, AHEAD)
    driver = run(core, one)
    assert sum(runner.are_ahead) > 2
    assert texts(driver) == texts(waiting)
    assert driver.drafted == waiting.drafted
    found, expected = (
        (each.num_draft_tokens, each.num_accepted_tokens, each.num_steps)
        for each in (driver.finishes["r1"].speculative, waiting.finishes["r1"].speculative)
    )
    assert found == expected


@pytest.mark.parametrize("method", ["copies", "copied"])
def test_a_drafter_that_fails_while_the_device_drafts_costs_drafts_alone(
    target: TinyTarget, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"{method} was told to fail")

    drafters = build_drafters(["ngram"])
    monkeypatch.setattr(drafters["ngram"], method, fail)
    core, runner = watched(target, AHEAD.but(drafters=drafters))
    long = replace(USUAL, max_tokens=80)
    driver = run(core, asked(1, long, drafting("ngram", "fixed", 4)), asked(2, long))
    assert texts(driver) == texts(run(target.core(Setup()), asked(1, long), asked(2, long)))
    assert driver.finishes["r1"].speculative.num_failed_drafts > 0
    assert any(runner.are_ahead)


@ON_CPU
def test_a_device_is_waited_for_once_a_step_though_it_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TritonTarget()
    copied = drafting("ngram", "fixed", 4, ngram_min=1)
    short = replace(USUAL, max_tokens=24)
    requests = [
        request("copies", circle_prompt(1), replace(short, logprobs=0), copied),
        asked(3, short),
    ]
    with patching_once():
        driver = WatchedDriver(target.core(AHEAD))
        # On a CPU, work is written to where it is read.
        writing = driver.looks._flagged("_is_transfer", triton._Ints.written)
        monkeypatch.setattr(triton._Ints, "written", writing)
        runner = driver.core.runner = Watched(driver.core.runner)
        driver.run(*requests)
        expected = run(target.core(Setup()), *requests)
    assert driver.looks.looks == {}
    assert set(driver.waits) <= {0, 1}
    assert sum(runner.are_ahead) > 2
    assert driver.token_ids == expected.token_ids
    accounts = [each.speculative for each in driver.finishes.values()]
    assert any(each.num_accepted_tokens for each in accounts)
    assert any(each.num_accepted_tokens < each.num_draft_tokens for each in accounts)


@ON_CPU
@pytest.mark.parametrize("is_padded", [False, True])
def test_rows_get_the_bits_that_they_get_where_they_are_known_to_lie(
    is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a captured step, too; a row that may have chunks of another length waits."""
    monkeypatch.setattr(triton.TritonAttention, "chunk", 16)
    monkeypatch.setattr(triton.TritonAttention, "most_chunks", 4)
    target = TritonTarget()
    runners = [target._runner(AHEAD) for _ in range(2)]
    for each in runners if is_padded else ():
        each._replays = DeviceGraphs(
            each._planned, each.attention, ReplayingMaker(), GraphSizes(4, 1, 100, 4)
        )
    with patching_once():
        for each in runners:
            each.prepare()
        for base, refused, can_move in ((9, 0, True), (30, 3, True), (61, 2, True), (62, 2, False)):
            moved_rows(runners, base, refused, can_move)


def moved_rows(runners: Sequence[ModelRunner], base: int, refused: int, can_move: bool) -> None:
    for runner in runners:
        for plane in (*runner.store.key, *runner.store.value):
            plane.normal_(generator=torch.Generator().manual_seed(base))
    known = RequestRows([5, 6, 7], 1, base - refused, range(-1, 1), range(100, 200), 3)
    settled = build_batch([known], 4)
    batch = build_batch([replace(known, token_ids=[0] * 3, base=base, num_unsure=3)], 4)
    batch.chosen = torch.tensor([5, 6, 7])
    columns = settled.positions, settled.slot_mapping, [refused] * 3
    batch.moved = torch.tensor(columns)
    assert runners[0].attention.can_move(batch) == can_move
    found, expected = (
        runner.forward(each).logits for runner, each in zip(runners, (batch, settled), strict=True)
    )
    assert torch.equal(found, expected)
    for mine, other in zip(runners[0].store.key, runners[1].store.key, strict=True):
        assert torch.equal(mine, other)


COPIED = drafting("ngram", "fixed", 6, ngram_min=1)


@pytest.mark.parametrize(
    ("speculative", "num_blocks", "num_steps"),
    [(PLAIN, 14, 3), *((COPIED, 26, number) for number in range(2, 9))],
    ids=["row", *(f"drafts after {number} steps" for number in range(2, 9))],
)
def test_an_abort_throws_away_what_is_under_way_and_its_blocks_serve_others(
    target: TinyTarget, speculative: SpeculativeParams, num_blocks: int, num_steps: int
) -> None:
    core, runner = watched(target, AHEAD.but(num_blocks=num_blocks))
    first, second, later = (asked(number, USUAL, speculative) for number in (0, 1, 3))
    driver = Driver(core)
    driver.submit(first, second)
    for _ in range(num_steps):
        driver.step()
    core.abort("r0")
    driver.submit(later)
    driver.run()
    assert any(runner.are_ahead)
    assert driver.finishes["r0"].reason == "abort"
    expected = texts(run(target.core(Setup()), asked(1), asked(3)))
    assert {name: each for name, each in texts(driver).items() if name != "r0"} == expected
    assert traces_of(core, driver.finishes) == []


@pytest.mark.parametrize("speculative", [PLAIN, drafting("ngram", "fixed", 4, ngram_min=1)])
@pytest.mark.parametrize("broken", [2, 3])
def test_a_step_that_breaks_when_it_is_launched_ahead_ends_its_requests_once(
    target: TinyTarget, broken: int, speculative: SpeculativeParams
) -> None:
    core, _ = watched(target, AHEAD, broken)
    core.submit(core.prepare(asked(0, USUAL, speculative)))
    core.submit(core.prepare(asked(1, USUAL, speculative)))
    events = [event for _ in range(6) for event in core.step().events]
    ends = [event.request_id for event in events if isinstance(event, ErrorEvent)]
    assert sorted(ends) == ["r0", "r1"]
    assert not core.has_work
    assert texts(run(core, asked(2))) == texts(run(target.core(Setup()), asked(2)))
