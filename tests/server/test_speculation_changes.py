"""One place that decides, and several processes that go by it."""

from __future__ import annotations

import pickle
from typing import Any

from server.errors import ApiError
from server.request.live_speculation import SpeculativeChange
from server.request.speculative import SpeculativeCaps, SpeculativeField, SpeculativeResolver
from server.speculation_changes import Change, Changed, NewSpeculation, SpeculationChanges
from worlds.scripted_engine import engine_info


class Process:
    """A worker at the end of a pipe: what it was sent, as it comes out there."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(pickle.loads(pickle.dumps(message)))

    @property
    def versions(self) -> list[int]:
        return [each.version for each in self.sent if isinstance(each, NewSpeculation)]

    @property
    def answers(self) -> list[Changed]:
        return [each for each in self.sent if isinstance(each, Changed)]


def changes() -> tuple[SpeculationChanges, list[Any]]:
    shown: list[Any] = []
    resolver = SpeculativeResolver(engine_info(), SpeculativeField(), SpeculativeCaps())
    return SpeculationChanges(resolver, lambda *said: shown.append(said)), shown


def wish(number: int, drafter: str) -> Change:
    body = {"defaults": {"draft_strategy": drafter}}
    return pickle.loads(pickle.dumps(Change(number, SpeculativeChange(**body), False)))


def test_the_answer_waits_until_everybody_goes_by_the_change() -> None:
    subject, shown = changes()
    workers = [Process(), Process(), Process()]
    subject.change(workers[0], wish(7, "nasd"), workers)
    assert [each.versions for each in workers] == [[1], [1], [1]]
    subject.adopted(workers[0], 1)
    subject.adopted(workers[1], 1)
    assert workers[0].answers == []
    subject.gone(workers[2])
    (answer,) = workers[0].answers
    assert answer.number == 7
    assert isinstance(answer.outcome, SpeculativeResolver)
    assert answer.outcome.defaults.draft_strategy == "nasd"
    assert subject.resolver.defaults.draft_strategy == "nasd"
    assert [(options.draft_strategy, is_change) for options, is_change in shown] == [("nasd", True)]


def test_a_later_version_answers_for_an_earlier_one() -> None:
    subject, _ = changes()
    first, second = Process(), Process()
    subject.change(first, wish(1, "nasd"), [first, second])
    subject.change(second, wish(2, "none"), [first, second])
    subject.adopted(first, 2)
    assert first.answers + second.answers == []
    subject.adopted(second, 2)
    assert [each.number for each in first.answers + second.answers] == [1, 2]
    assert first.sent[-2].resolver.defaults.draft_strategy == "none"


def test_what_does_not_fit_is_told_to_nobody_but_its_sender() -> None:
    subject, shown = changes()
    first, second = Process(), Process()
    before = subject.resolver
    subject.change(first, wish(1, "eagle"), [first, second])
    (answer,) = first.answers
    assert isinstance(answer.outcome, ApiError)
    assert answer.outcome.param == "defaults.draft_strategy"
    assert (second.sent, subject.resolver, shown) == ([], before, [])
