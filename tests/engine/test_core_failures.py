"""A drafter that fails costs its request drafts: never the request, its neighbours or the engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from drafters.base import DraftRequest
from drafters.registry import build_drafters
from drafters.tree import DraftTree, chain
from engine.params import GenerationRequest, SamplingParams
from worlds.engine_harness import Driver, Setup, drafting, request, traces_of
from worlds.fake_drafters import FakeDrafter, foreseeing
from worlds.scripted_target import ScriptedTarget

TARGET = ScriptedTarget(8)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]
TEXT = [*PROMPT, *TARGET.stream(request("r", PROMPT, GREEDY), (), 256)[0]]
SILENCE_AFTER = 8


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The tracebacks are expected."""
    caplog.set_level(logging.CRITICAL, logger="engine.speculation.manager")


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


def test_a_drafter_that_could_not_start_a_request_is_not_asked_for_it() -> None:
    fake = FakeDrafter(fails="open")
    run(fake, "r")
    assert fake.asks == []
    assert fake.observed == []


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_one_that_keeps_failing_is_left_alone(method: str) -> None:
    fake = FakeDrafter(fails=method)
    driver = run(fake, "r")
    calls = fake.asks if method == "propose" else fake.observed
    assert len(calls) == SILENCE_AFTER
    assert driver.finishes["r"].speculative.num_failed_drafts == SILENCE_AFTER
    assert sum(stats.num_draft_failures for stats in driver.stats) == SILENCE_AFTER


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
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(name: str) -> None:
    driver = run(GARBAGE[name], "r")
    account = driver.finishes["r"].speculative
    assert account.num_failed_drafts == SILENCE_AFTER
    assert account.num_draft_tokens == 0


class Miscounting(FakeDrafter):
    def propose(self, requests: Any) -> list[DraftTree]:
        return super().propose(requests)[:-1]


def test_fewer_trees_than_requests_are_refused() -> None:
    driver = run(Miscounting(propose=foreseeing(TEXT)), "r", "s")
    for name in "rs":
        assert driver.finishes[name].speculative.num_failed_drafts == SILENCE_AFTER


def test_failures_are_told_of_aborted_requests_too() -> None:
    fake = FakeDrafter(fails="propose")
    core = TARGET.core(Setup(drafters={"fake": fake}))
    driver = Driver(core)
    driver.submit(request("r", PROMPT, GREEDY, drafting("fake")))
    for _ in range(3):
        driver.step()
    core.abort("r")
    driver.step()
    assert driver.finishes["r"].speculative.num_failed_drafts == 3
