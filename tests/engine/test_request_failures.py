"""What breaks for one request ends that request; what breaks for nobody in particular ends the step's
requests. The others get the tokens they would have got, and nothing is left behind."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from drafters.registry import build_drafters
from engine.batch import ForwardOutput, InputBatch
from engine.core import MAX_FAILED_STEPS, EngineCore
from engine.request.errors import RequestFailedError
from engine.request.events import ErrorEvent, TokenEvent
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.processor import Facts, LogitsProcessor, Path, Stage
from engine.sampling.processors.grammar import Grammar
from worlds.engine_harness import Driver, Setup, build_core, drafting, request, traces_of
from worlds.fake_drafters import FakeDrafter, foreseeing
from worlds.scripted_target import ScriptedRunner, ScriptedTarget

TARGET = ScriptedTarget(8)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=2)
SETUP = Setup(check_integrity=True)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The tracebacks are expected."""
    caplog.set_level(logging.CRITICAL, logger="engine")


class Failures(Driver):
    """Keeps how requests failed, too."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.failures: dict[str, str] = {}

    def _take(self, event: TokenEvent | ErrorEvent) -> None:
        assert event.request_id not in self.failures, "it speaks after its last event"
        if isinstance(event, TokenEvent):
            super()._take(event)
            return
        assert isinstance(event.error, RequestFailedError)
        assert event.request_id not in self.finishes
        self.failures[event.request_id] = str(event.error)


class Breaking(LogitsProcessor):
    """Changes nothing, and breaks after so many tokens where it is told to."""

    stage = Stage.BIAS
    parameters = ()

    def __init__(self, method: str, num_tokens: int, error: BaseException) -> None:
        self._method, self._left, self._error = method, num_tokens, error

    def append(self, token_ids: Sequence[int]) -> None:
        self._left -= len(token_ids)
        self._maybe("append")

    def is_active(self) -> bool:
        self._maybe("is_active")
        return True

    def process(self, logits: torch.Tensor, paths: Sequence[Path]) -> None:
        del paths
        logits[0, 0] += 1e9  # half-done work must not be seen
        self._maybe("process")
        logits[0, 0] -= 1e9

    def _maybe(self, method: str) -> None:
        if method == self._method and self._left <= 0:
            raise self._error


class Refusing(ScriptedRunner):
    """Breaks at the forwards that it is told of, counted from 1."""

    def __init__(self, target: ScriptedTarget, breaks: Callable[[int], bool], error: Exception):
        super().__init__(target, SETUP.num_blocks, SETUP.block_size)
        self.num_forwards = 0
        self._breaks, self._error = breaks, error

    def forward(self, batch: InputBatch) -> ForwardOutput:
        self.num_forwards += 1
        if self._breaks(self.num_forwards):
            raise self._error
        return super().forward(batch)


def text_of(each: GenerationRequest) -> list[int]:
    return TARGET.stream(each, (), 256)[0]


def neighbours() -> list[GenerationRequest]:
    oracle = drafting("oracle", num_tokens=4)
    rejection = SpeculativeParams(
        draft_strategy="nasd",
        adaptive_depth="fixed",
        num_speculative_tokens=4,
        max_speculative_tokens=4,
        verification="rejection",
    )
    return [
        request("greedy", PROMPT, GREEDY, oracle),
        request("plain", PROMPT[1:], GREEDY),
        request("sampled", PROMPT, SAMPLED, drafting("ngram", ngram_min=1)),
        request("rejection", PROMPT[2:], SAMPLED, rejection),
    ]


def drafters() -> dict[str, Any]:
    text = [*PROMPT, *text_of(request("r", PROMPT, GREEDY))]
    return build_drafters() | {"oracle": FakeDrafter("oracle", propose=foreseeing(text))}


def core_with(**setup: Any) -> EngineCore:
    return TARGET.core(SETUP.but(drafters=drafters(), **setup))


def left_nothing(driver: Failures) -> None:
    names = [*driver.finishes, *driver.failures]
    assert traces_of(driver.core, names) == []
    counts = driver.core.pool.counts()
    assert counts["committed"] == counts["draft"] == 0


def undisturbed() -> Failures:
    """The neighbours by themselves."""
    driver = Failures(core_with())
    driver.run(*neighbours())
    return driver


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("verification", ["match", "block"])
@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("method", ["process", "is_active", "append"])
def test_a_processor_that_raises_ends_its_request_and_no_other(
    method: str, num_tokens: int, verification: Any, error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("signal.getsignal", lambda _: None)  # as where a server handles Ctrl-C
    driver = Failures(core_with())
    sampling = SAMPLED if verification == "block" else GREEDY
    wanted = SpeculativeParams(
        draft_strategy="oracle",
        adaptive_depth="fixed",
        num_speculative_tokens=4,
        verification=verification,
    )
    odd = driver.core.prepare(request("odd", PROMPT, sampling, wanted))
    odd.sampling.processors.append(Breaking(method, num_tokens, error))
    driver.submit(*neighbours()[:2])
    for name in (driver.token_ids, driver.drafted, driver.logprobs, driver.prompt_logprobs):
        name["odd"] = []
    driver.num_draft_tokens["odd"] = driver._submitted["odd"] = 0
    driver.draft_seconds["odd"] = driver.verify_seconds["odd"] = 0.0
    driver.core.submit(odd)
    driver.run(*neighbours()[2:])
    assert driver.failures == {"odd": f"{type(error).__name__}: {error}"}
    whole = text_of(request("r", PROMPT, sampling)) if verification == "match" else None
    if whole is not None:
        assert driver.token_ids["odd"] == whole[: len(driver.token_ids["odd"])]
    assert len(driver.token_ids["odd"]) < sampling.max_tokens
    alone = undisturbed()
    for each in neighbours():
        name = each.request_id
        assert driver.token_ids[name] == alone.token_ids[name]
        assert driver.logprobs[name] == alone.logprobs[name]
        assert driver.finishes[name].reason == "length"
        assert driver.finishes[name].speculative.num_failed_drafts == 0
    left_nothing(driver)


class GaveUp:
    """A grammar that has become too complex: it says so whatever it is asked for."""

    def forced(self, path: Path = ()) -> Path:
        del path
        return ()

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"the grammar gave up, asked for {name}")


def test_a_grammar_that_gives_up_ends_its_request_and_no_other() -> None:
    driver = Failures(core_with())
    driver.submit(request("odd", PROMPT, GREEDY, drafting("oracle", num_tokens=4)), *neighbours())
    (odd,) = [each for each in driver.core.scheduler.waiting if each.request_id == "odd"]
    grammar: Any = GaveUp()
    odd.sampling.grammar = grammar
    facts = Facts(odd.sampling.params, (), frozenset(), TARGET.vocab_size, grammar)
    odd.sampling.processors.append(Grammar(facts, ""))
    driver.run()
    assert driver.failures == {"odd": "ValueError: the grammar gave up, asked for allowed"}
    alone = undisturbed()
    assert driver.finishes.keys() == alone.finishes.keys()
    for name in alone.finishes:
        assert driver.token_ids[name] == alone.token_ids[name]
    left_nothing(driver)


def test_what_breaks_while_an_event_is_made_still_ends_in_one_event() -> None:
    driver = Failures(core_with())
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    driver.submit(request("odd", PROMPT, asked), *neighbours())
    (odd,) = [each for each in driver.core.scheduler.waiting if each.request_id == "odd"]
    odd.prompt_logprobs = dict.fromkeys(range(100, 120))  # type: ignore[assignment]
    driver.run()
    assert list(driver.failures) == ["odd"]
    assert len(driver.finishes) == 4
    left_nothing(driver)


def test_a_user_s_interrupt_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a terminal; in the background it may be ignored.
    monkeypatch.setattr("signal.getsignal", lambda _: signal.default_int_handler)
    core = core_with()
    odd = core.prepare(request("odd", PROMPT, GREEDY))
    odd.sampling.processors.append(Breaking("process", 0, KeyboardInterrupt()))
    core.submit(odd)
    with pytest.raises(KeyboardInterrupt):
        core.step()


@pytest.mark.parametrize("error", [RuntimeError("no room"), torch.OutOfMemoryError("no room")])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_breaks_ends_its_requests_and_the_next_ones_are_served(
    at: int, error: Exception
) -> None:
    runner = Refusing(TARGET, lambda number: number == at, error)
    driver = Failures(build_core(runner, 8, SETUP.but(drafters=drafters(), max_num_seqs=2)))
    driver.run(*neighbours())
    assert set(driver.failures) == {"greedy", "plain"}
    for name in ("sampled", "rejection"):
        assert driver.token_ids[name] == undisturbed().token_ids[name]
    # What was cached before is not trusted, and the same prompts are served once more.
    driver.failures.clear()
    again = request("again", PROMPT, GREEDY, drafting("oracle", num_tokens=4))
    driver.run(again)
    assert driver.token_ids["again"] == text_of(again)
    left_nothing(driver)


def test_blocks_that_a_broken_step_published_are_not_used() -> None:
    """It broke between publishing blocks and moving accepted rows into them."""
    driver = Failures(core_with())
    driver.submit(request("r", PROMPT * 2, GREEDY))
    move = driver.core.runner.move
    driver.core.runner.move = None  # type: ignore[method-assign, assignment]
    driver.step()
    assert set(driver.failures) == {"r"}
    assert driver.core.pool.counts()["free"] == SETUP.num_blocks
    driver.core.runner.move = move  # type: ignore[method-assign]
    driver.run(request("s", PROMPT * 2, GREEDY))
    assert driver.finishes["s"].num_cached_tokens == 0


def test_an_engine_whose_steps_all_break_gives_up() -> None:
    runner = Refusing(TARGET, lambda _: True, RuntimeError("the device is gone"))
    driver = Failures(build_core(runner, 8, SETUP))
    for number in range(1, MAX_FAILED_STEPS):
        driver.run(request(f"r{number}", PROMPT, GREEDY))
    assert len(driver.failures) == MAX_FAILED_STEPS - 1
    with pytest.raises(RuntimeError, match="the device is gone"):
        driver.run(request("last", PROMPT, GREEDY))


def test_steps_that_break_now_and_then_are_no_reason_to_give_up() -> None:
    runner = Refusing(TARGET, lambda number: number % 5 == 0, RuntimeError("now and then"))
    driver = Failures(build_core(runner, 8, SETUP))
    for number in range(3 * MAX_FAILED_STEPS):
        driver.run(request(f"r{number}", PROMPT, GREEDY))
    assert len(driver.failures) == 3 * MAX_FAILED_STEPS


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), torch.AcceleratorError("asserted", 710)]
)
def test_what_no_later_step_survives_ends_the_engine_at_once(error: Exception) -> None:
    core = build_core(Refusing(TARGET, lambda _: True, error), 8, SETUP)
    core.submit(core.prepare(request("r", PROMPT, GREEDY)))
    with pytest.raises(type(error)):
        core.step()
