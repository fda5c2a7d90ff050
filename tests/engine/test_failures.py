"""A drafter that fails costs its request drafts: never the request, its neighbours or the engine. Any
other fault of one request ends that request, and a fault of nobody in particular the step's requests. The
others get the tokens they would have got, and nothing is left behind."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafters.base import DraftRequest
from drafters.registry import build_drafters
from drafters.tree import DraftTree, chain
from engine.batch import ForwardOutput, InputBatch
from engine.core import MAX_FAILED_STEPS, EngineCore
from engine.grammar.mask_time import MaskTime
from engine.request.errors import RequestFailedError
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.processor import Facts, LogitsProcessor, Path, Stage
from engine.sampling.processors.grammar import Grammar
from worlds.engine_harness import (
    Driver,
    ErrorDriver,
    Setup,
    build_core,
    drafting,
    request,
    traces_of,
)
from worlds.fake_drafters import FakeDrafter, foreseeing
from worlds.scripted_target import ScriptedRunner, ScriptedTarget

TARGET = ScriptedTarget(8)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]
TEXT = [*PROMPT, *TARGET.stream(request("r", PROMPT, GREEDY), (), 256)[0]]
SILENCE_AFTER = 8
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=2)
SETUP = Setup(check_integrity=True)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The tracebacks are expected."""
    caplog.set_level(logging.CRITICAL, logger="engine")
    caplog.set_level(logging.CRITICAL, logger="drafters.containment")


def run(fake: FakeDrafter, *names: str) -> Driver:
    """Requests drafted by ``fake``, beside one drafted by ``ngram``; all texts are checked."""
    drafters = build_drafters() | {fake.info.name: fake}
    requests: list[GenerationRequest] = [
        request(name, PROMPT, GREEDY, drafting(fake.info.name, num_tokens=4)) for name in names
    ]
    bystander = request("bystander", PROMPT, GREEDY, drafting("ngram", ngram_min=1))
    core = TARGET.core(Setup(drafters=drafters))
    driver = Driver(core).run(*requests, bystander)
    for each in (*requests, bystander):
        assert driver.token_ids[each.request_id] == TEXT[len(PROMPT) :]
        assert driver.finishes[each.request_id].reason == "length"
    account = driver.finishes["bystander"].speculative
    assert account.num_failed_drafts == 0
    assert account.num_accepted_tokens > 0
    assert traces_of(core, driver.finishes) == []
    return driver


def test_a_working_fake_is_heard_and_never_fails() -> None:
    fake = FakeDrafter(propose=foreseeing(TEXT, num_right=2))
    driver = run(fake, "r")
    account = driver.finishes["r"].speculative
    assert account.num_failed_drafts == 0
    assert 0 < account.num_accepted_tokens < account.num_draft_tokens
    assert (fake.opened, fake.closed) == (["r"], ["r"])


@pytest.mark.parametrize("method", ["open", "propose", "observe", "num_top_tokens", "close"])
def test_a_method_that_always_raises(method: str) -> None:
    fake = FakeDrafter(propose=foreseeing(TEXT), fails=method)
    driver = run(fake, "r")
    account = driver.finishes["r"].speculative
    assert account.num_failed_drafts > 0
    assert fake.closed == ["r"]
    drafted = method in ("observe", "num_top_tokens", "close")
    assert (account.num_draft_tokens > 0) == drafted


@pytest.mark.parametrize("method", ["open", "propose", "observe"])
def test_one_that_could_not_start_is_not_asked_and_one_that_keeps_failing_is_left_alone(
    method: str,
) -> None:
    fake = FakeDrafter(fails=method)
    driver = run(fake, "r")
    if method == "open":
        assert (fake.asks, fake.observed) == ([], [])
        return
    assert len(fake.asks if method == "propose" else fake.observed) == SILENCE_AFTER
    assert driver.finishes["r"].speculative.num_failed_drafts == SILENCE_AFTER
    assert sum(stats.num_draft_failures for stats in driver.stats) == SILENCE_AFTER


def test_failures_are_told_of_aborted_requests_too() -> None:
    core = TARGET.core(Setup(drafters={"fake": FakeDrafter(fails="propose")}))
    driver = Driver(core)
    driver.submit(request("r", PROMPT, GREEDY, drafting("fake")))
    for _ in range(3):
        driver.step()
    core.abort("r")
    driver.step()
    assert driver.finishes["r"].speculative.num_failed_drafts == 3


@pytest.mark.parametrize("method", ["open", "propose", "num_top_tokens", "close"])
def test_failing_for_one_request_leaves_the_others_their_drafts(method: str) -> None:
    fake = FakeDrafter(propose=foreseeing(TEXT), fails=method, failing={"bad"})
    driver = run(fake, "good", "bad", "fine")
    assert driver.finishes["bad"].speculative.num_failed_drafts > 0
    for name in ("good", "fine"):
        account = driver.finishes[name].speculative
        assert account.num_failed_drafts == 0
        assert account.acceptance_rate == 1.0
        assert account.num_accepted_tokens > GREEDY.max_tokens // 2


def only(tree: Any) -> FakeDrafter:
    return FakeDrafter(propose=lambda _: tree)


def too_many(ask: DraftRequest) -> DraftTree:
    return chain([1] * (ask.max_nodes + 1))


def too_deep(ask: DraftRequest) -> DraftTree:
    return chain([1] * (ask.shape.depth + 1))


GARBAGE = {
    "beyond_the_vocabulary": only(chain([1, 8])),
    "negative_token": only(chain([-1])),
    "too_many_nodes": FakeDrafter(propose=too_many),
    "too_deep": FakeDrafter(propose=too_deep),
    "child_before_parent": only(DraftTree([1, 2], [1, -1], [0, 0])),
    "own_parent": only(DraftTree([1], [0], [0])),
    "parent_below_the_root": only(DraftTree([1], [-2], [0])),
    "equal_siblings": only(DraftTree([1, 1], [-1, -1], [0, 0])),
    "lengths_differ": only(DraftTree([1, 2], [-1, 0], [0])),
    "empty_with_parents": only(DraftTree([], [-1], [])),
    "fractional_token": only(DraftTree([1.5], [-1], [0])),  # type: ignore[list-item]
    "unhashable_feature": only(DraftTree([1], [-1], [[]])),  # type: ignore[list-item]
    "no_tree": only(None),
    "a_list": only([1, 2, 3]),
    "numpy_tokens": only(DraftTree(np.array([1, 2]), [-1, 0], [0, 0])),  # type: ignore[arg-type]
    "numpy_integers": only(chain([np.int64(1)])),  # type: ignore[list-item]
    "tensors": only(DraftTree(torch.tensor([1]), [-1], [0])),  # type: ignore[arg-type]
    "booleans": only(chain([True])),
    "a_set_of_tokens": only(DraftTree({1, 2}, [-1, 0], [0, 0])),  # type: ignore[arg-type]
    "a_deque": only(DraftTree(deque([1, 2]), [-1, 0], [0, 0])),
    "text": only(DraftTree("ab", [-1, 0], [0, 0])),  # type: ignore[arg-type]
    "no_probs": only(DraftTree([1], [-1], [0], None)),  # type: ignore[arg-type]
    "parents_as_text": only(DraftTree([1], ["-1"], [0])),  # type: ignore[list-item]
}


class Answering(FakeDrafter):
    """Gives back something else than trees."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        super().__init__()
        self._answer = answer

    def propose(self, requests: Any) -> Any:
        self.asks.append(requests)
        return self._answer(requests)


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "a_generator": lambda asks: (chain([1]) for _ in asks),
    "an_endless_generator": lambda _: (chain([1]) for _ in iter(int, 1)),
    "none": lambda _: None,
    "too_many": lambda asks: [chain([1])] * (len(asks) + 1),
    "too_few": lambda asks: [chain([1])] * (len(asks) - 1),
    "a_mapping": lambda asks: {ask.request_id: chain([1]) for ask in asks},
    "what_looks_like_a_tree": lambda _: [SimpleNamespace(token_ids=[99], validate=print)],
    "a_class": lambda _: DraftTree,
}


@pytest.mark.parametrize(
    "fake",
    [*GARBAGE.values(), *map(Answering, ANSWERS.values())],
    ids=[*GARBAGE, *(f"answer_{name}" for name in ANSWERS)],
)
def test_garbage_is_refused(fake: FakeDrafter) -> None:
    driver = run(fake, "r", *("s" if isinstance(fake, Answering) else ""))
    for name in {"r", "s"} & driver.finishes.keys():
        account = driver.finishes[name].speculative
        assert account.num_failed_drafts == SILENCE_AFTER
        assert account.num_draft_tokens == 0


class Leaving(FakeDrafter):
    """Ends the program where a test wants, or tries to."""

    def __init__(self, method: str, error: type[BaseException]) -> None:
        super().__init__(propose=foreseeing(TEXT), fails=method)
        self._error = error

    def _maybe_fail(self, method: str, request_id: str) -> None:
        del request_id
        if method == self.fails:
            raise self._error

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        self._maybe_fail("read_prompt" if num_tokens else "announced", request_id)
        return 0


class Odd(BaseException):
    """An error of no kind that is usually caught."""


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, MemoryError, Odd])
@pytest.mark.parametrize(
    "method", ["open", "announced", "read_prompt", "propose", "observe", "num_top_tokens", "close"]
)
def test_a_drafter_that_ends_the_program_fails_its_request(
    method: str, error: type[BaseException]
) -> None:
    driver = run(Leaving(method, error), "r")
    assert driver.finishes["r"].speculative.num_failed_drafts > 0


def test_an_interrupt_is_the_user_s_or_the_drafter_s(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a terminal; in the background it may be ignored.
    monkeypatch.setattr("signal.getsignal", lambda _: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run(Leaving("propose", KeyboardInterrupt), "r")
    monkeypatch.setattr("signal.getsignal", lambda _: None)
    driver = run(Leaving("propose", KeyboardInterrupt), "r")
    assert driver.finishes["r"].speculative.num_failed_drafts == SILENCE_AFTER


NO_COUNTS = {
    "text": "12",
    "negative": -1,
    "boolean": True,
    "fraction": 2.0,
    "numpy": np.int64(2),
    "none": None,
    "endless": "x" * 10_000_000,
    "beyond": 1 << 80,
}


class Counting(FakeDrafter):
    def __init__(self, method: str, value: Any) -> None:
        super().__init__(propose=foreseeing(TEXT))
        self._counts = {method: value}

    def read_prompt(self, request_id: str, num_tokens: int) -> Any:  # noqa: ARG002
        return self._counts.get("read_prompt", 0) if num_tokens else 0

    def num_top_tokens(self, request_id: str) -> Any:  # noqa: ARG002
        return self._counts.get("num_top_tokens", 0)


@pytest.mark.parametrize("name", NO_COUNTS)
@pytest.mark.parametrize("method", ["num_top_tokens", "read_prompt"])
def test_what_is_no_count_is_a_failure(method: str, name: str) -> None:
    """More top tokens than the vocabulary has come to all; more read than was asked for is a failure."""
    fake = Counting(method, NO_COUNTS[name])
    account = run(fake, "r").finishes["r"].speculative
    failures = 1 if method == "read_prompt" else len(fake.observed)
    assert account.num_accepted_tokens > 0
    if (method, name) == ("num_top_tokens", "beyond"):
        failures = 0
        tops = [seen.top_token_ids for group in fake.observed for seen in group]
        assert {len(row) for rows in tops for row in rows or ()} == {TARGET.vocab_size}
    assert account.num_failed_drafts == failures


@pytest.mark.parametrize(
    "broken",
    [
        Counting("num_top_tokens", "12"),
        Counting("read_prompt", -5),
        Leaving("propose", SystemExit),
        Leaving("open", Odd),
        Answering(lambda asks: (chain([1]) for _ in range(2 * len(asks)))),
    ],
    ids=["num_top_tokens", "read_prompt", "propose", "open", "answer"],
)
def test_a_broken_guest_leaves_auto_its_own_draft(broken: FakeDrafter) -> None:
    auto = build_drafters()["auto"]
    auto.meet({"fake": broken})
    core = TARGET.core(Setup(drafters={"auto": auto}))
    driver = Driver(core).run(request("r", PROMPT, GREEDY, drafting("auto")))
    assert driver.token_ids["r"] == TEXT[len(PROMPT) :]
    account = driver.finishes["r"].speculative
    assert account.num_failed_drafts == 0
    assert account.num_accepted_tokens > 0
    assert traces_of(core, driver.finishes) == []


# --- faults of no drafter ---


def failures(driver: ErrorDriver) -> dict[str, str]:
    """How requests failed."""
    assert all(isinstance(each, RequestFailedError) for each in driver.errors.values())
    return {name: str(error) for name, error in driver.errors.items()}


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
        request("rejecting", PROMPT[2:], SAMPLED, rejection),
    ]


def drafters() -> dict[str, Any]:
    return build_drafters() | {"oracle": FakeDrafter("oracle", propose=foreseeing(TEXT))}


def core_with(**setup: Any) -> EngineCore:
    return TARGET.core(SETUP.but(drafters=drafters(), **setup))


def waiting(driver: Driver, name: str) -> Any:
    """The engine's own request."""
    (found,) = [each for each in driver.core.scheduler.waiting if each.request_id == name]
    return found


def left_nothing(driver: ErrorDriver) -> None:
    names = [*driver.finishes, *driver.errors]
    assert traces_of(driver.core, names) == []
    counts = driver.core.pool.counts()
    assert counts["committed"] == counts["draft"] == 0


def undisturbed() -> ErrorDriver:
    """The neighbours by themselves."""
    driver = ErrorDriver(core_with())
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
    driver = ErrorDriver(core_with())
    sampling = SAMPLED if verification == "block" else GREEDY
    wanted = SpeculativeParams(
        draft_strategy="oracle",
        adaptive_depth="fixed",
        num_speculative_tokens=4,
        verification=verification,
    )
    driver.submit(*neighbours()[:2], request("odd", PROMPT, sampling, wanted))
    odd = waiting(driver, "odd")
    odd.sampling.processors.append(Breaking(method, num_tokens, error))
    driver.run(*neighbours()[2:])
    assert failures(driver) == {"odd": f"{type(error).__name__}: {error}"}
    written = driver.token_ids["odd"]
    if verification == "match":
        assert written == text_of(request("r", PROMPT, sampling))[: len(written)]
    assert len(written) < sampling.max_tokens
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

    def __init__(self) -> None:
        self.time = MaskTime()

    def forced(self, path: Path = ()) -> Path:
        del path
        return ()

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"the grammar gave up, asked for {name}")


def test_a_grammar_that_gives_up_ends_its_request_and_no_other() -> None:
    driver = ErrorDriver(core_with())
    driver.submit(request("odd", PROMPT, GREEDY, drafting("oracle", num_tokens=4)), *neighbours())
    sampling: Any = waiting(driver, "odd").sampling
    grammar: Any = GaveUp()
    sampling.grammar = grammar
    facts = Facts(sampling.params, (), frozenset(), TARGET.vocab_size, grammar)
    sampling.processors.append(Grammar(facts, ""))
    driver.run()
    assert failures(driver) == {"odd": "ValueError: the grammar gave up, asked for allowed"}
    alone = undisturbed()
    assert driver.finishes.keys() == alone.finishes.keys()
    for name in alone.finishes:
        assert driver.token_ids[name] == alone.token_ids[name]
    left_nothing(driver)


def test_what_breaks_while_an_event_is_made_still_ends_in_one_event() -> None:
    driver = ErrorDriver(core_with())
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    driver.submit(request("odd", PROMPT, asked), *neighbours())
    waiting(driver, "odd").prompt_logprobs = dict.fromkeys(range(100, 120))
    driver.run()
    assert list(failures(driver)) == ["odd"]
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
    driver = ErrorDriver(build_core(runner, 8, SETUP.but(drafters=drafters(), max_num_seqs=2)))
    driver.run(*neighbours())
    assert set(failures(driver)) == {"greedy", "plain"}
    for name in ("sampled", "rejecting"):
        assert driver.token_ids[name] == undisturbed().token_ids[name]
    # What was cached before is not trusted, and the same prompts are served once more.
    driver.errors.clear()
    again = request("again", PROMPT, GREEDY, drafting("oracle", num_tokens=4))
    driver.run(again)
    assert driver.token_ids["again"] == text_of(again)
    left_nothing(driver)


def test_blocks_that_a_broken_step_published_are_not_used() -> None:
    """It broke between publishing blocks and moving accepted rows into them."""
    driver = ErrorDriver(core_with())
    driver.submit(request("r", PROMPT * 2, GREEDY))
    move = driver.core.runner.move
    driver.core.runner.move = None  # type: ignore[method-assign, assignment]
    driver.step()
    assert set(failures(driver)) == {"r"}
    assert driver.core.pool.counts()["free"] == SETUP.num_blocks
    driver.core.runner.move = move  # type: ignore[method-assign]
    driver.run(request("s", PROMPT * 2, GREEDY))
    assert driver.finishes["s"].num_cached_tokens == 0


def test_an_engine_whose_steps_all_break_gives_up() -> None:
    runner = Refusing(TARGET, lambda _: True, RuntimeError("the device is gone"))
    driver = ErrorDriver(build_core(runner, 8, SETUP))
    for number in range(1, MAX_FAILED_STEPS):
        driver.run(request(f"r{number}", PROMPT, GREEDY))
    assert len(failures(driver)) == MAX_FAILED_STEPS - 1
    with pytest.raises(RuntimeError, match="the device is gone"):
        driver.run(request("last", PROMPT, GREEDY))
    # Steps that break now and then are no reason to.
    runner = Refusing(TARGET, lambda number: number % 5 == 0, RuntimeError("now and then"))
    driver = ErrorDriver(build_core(runner, 8, SETUP))
    for number in range(3 * MAX_FAILED_STEPS):
        driver.run(request(f"r{number}", PROMPT, GREEDY))
    assert len(failures(driver)) == 3 * MAX_FAILED_STEPS
    # What no later step survives ends it at once.
    for error in (MemoryError("none left"), torch.AcceleratorError("asserted", 710)):
        core = build_core(Refusing(TARGET, lambda _: True, error), 8, SETUP)
        core.submit(core.prepare(request("r", PROMPT, GREEDY)))
        with pytest.raises(type(error)):
            core.step()
