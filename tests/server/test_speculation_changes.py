"""One place that decides on speculation, and several processes that go by it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from engine.process.link import PeerGoneError
from server.errors import ApiError
from server.request.live_speculation import SpeculativeChange
from server.request.speculative import SpeculativeCaps, SpeculativeField, SpeculativeResolver
from server.workers.parent import SpeculationChanges
from worlds.scripted_engine import engine_info


class Process:
    """A worker: what it was asked, and what it will say to each question."""

    def __init__(self) -> None:
        self.asked: list[SpeculativeResolver] = []
        self.answers: list[Future[None]] = []

    def ask(self, name: str, resolver: SpeculativeResolver) -> Future[None]:
        assert name == "adopt"
        self.asked.append(resolver)
        self.answers.append(Future())
        return self.answers[-1]

    @property
    def drafters(self) -> list[str]:
        return [each.defaults.draft_strategy for each in self.asked]


def changes() -> tuple[SpeculationChanges, list[Any]]:
    shown: list[Any] = []
    resolver = SpeculativeResolver(engine_info(), SpeculativeField(), SpeculativeCaps())
    return SpeculationChanges(resolver, lambda *said: shown.append(said)), shown


def wish(drafter: str) -> SpeculativeChange:
    return SpeculativeChange(**{"defaults": {"draft_strategy": drafter}})  # type: ignore[arg-type]


def test_the_answer_waits_until_everybody_goes_by_the_change() -> None:
    subject, shown = changes()
    workers: list[Any] = [Process(), Process(), Process()]
    answer = subject.change(wish("nasd"), False, workers)
    assert [each.drafters for each in workers] == [["nasd"]] * 3
    workers[0].answers[0].set_result(None)
    workers[1].answers[0].set_result(None)
    assert not answer.done()
    workers[2].answers[0].set_exception(PeerGoneError())
    assert answer.result(0) is subject.resolver
    assert subject.resolver.defaults.draft_strategy == "nasd"
    assert [(options.draft_strategy, is_change) for options, is_change in shown] == [("nasd", True)]


def test_changes_are_told_in_order_and_answered_each() -> None:
    subject, _ = changes()
    workers: list[Any] = [Process(), Process()]
    answers = [subject.change(wish(name), False, workers) for name in ("nasd", "none")]
    assert [each.drafters for each in workers] == [["nasd", "none"]] * 2
    for each in workers:
        each.answers[1].set_result(None)
    assert [each.done() for each in answers] == [False, True]


def test_what_does_not_fit_is_told_to_nobody_but_its_sender() -> None:
    subject, shown = changes()
    other: Any = Process()
    before = subject.resolver
    with pytest.raises(ApiError) as refused:
        subject.change(wish("eagle"), False, [other])
    assert refused.value.param == "defaults.draft_strategy"
    assert (other.asked, subject.resolver, shown) == ([], before, [])
