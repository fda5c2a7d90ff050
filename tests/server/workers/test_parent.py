"""A worker asks the process that launched it, here over a pipe within one process."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from engine.process.launch import Child
from engine.process.link import Link, PeerGoneError
from server.errors import ApiError, bad_request
from server.metrics.prometheus import Metrics
from server.request.speculative import (
    SpeculativeCaps,
    SpeculativeChange,
    SpeculativeField,
    SpeculativeResolver,
)
from server.response_store import ResponseStore
from server.workers.child import RemoteMetrics, change_remotely
from server.workers.parent import Workers, _Worker
from worlds.scripted_engine import engine_info


class Parent(Workers):
    """Acts as ``Workers`` do, with metrics that may fail."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self._responses = ResponseStore(9)


def nothing() -> None:
    """Does as a peer that has gone."""


def metrics() -> Metrics:
    return Metrics(engine_info(), "model", lambda: True)


class Broken(Metrics):
    def exposition(self, accept: str) -> tuple[bytes, str]:
        raise ZeroDivisionError(f"a collector failed for {accept}")


async def test_figures_are_counted_and_shown_across_the_pipe() -> None:
    ours, theirs = (Link(each) for each in Pipe())
    parent: Any = Parent(metrics())
    theirs.listen_in_thread(parent._acts(_Worker(Child(None, theirs))), nothing)  # type: ignore[arg-type]
    ours.listen_in_thread({}, nothing)
    remote = RemoteMetrics(ours)
    remote.count("requests", "stop")
    remote.count("http_requests", "GET", "/health", "200")
    content, content_type = await remote.expose("text/plain")
    assert b'slipstream_requests_total{finish_reason="stop"} 1.0' in content
    assert b'path="/health",status="200"} 1.0' in content
    assert content_type.startswith("text/plain")
    for act, arguments, found in (
        ("keep", ("tenant", "resp_1", b"12345"), None),
        ("find", ("tenant", "resp_1"), b"12345"),
        ("keep", ("tenant", "resp_2", b"67890"), None),
        ("find", ("tenant", "resp_1"), None),
        ("find", ("other", "resp_2"), None),
        ("drop", ("tenant", "resp_2"), b"67890"),
    ):
        assert await asyncio.wrap_future(ours.ask(act, *arguments)) == found


async def test_metrics_that_fail_are_an_error_and_not_an_endless_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = (Link(each) for each in Pipe())
    parent: Any = Parent(Broken(engine_info(), "model", lambda: True))
    acts = parent._acts(_Worker(Child(None, theirs)))  # type: ignore[arg-type]
    theirs.listen_in_thread({**acts, "leave": theirs.close}, nothing)
    ours.listen_in_thread({}, nothing)
    remote = RemoteMetrics(ours)
    with pytest.raises(ZeroDivisionError, match="a collector failed"):
        await remote.expose("text/plain")
    # Nor does what cannot be counted end the counting.
    ours.call("count", "nothing")
    remote.count("requests", "stop")
    with pytest.raises(ZeroDivisionError):
        await remote.expose("text/plain")
    assert "failed to act" in caplog.text
    ours.call("leave")
    with pytest.raises(PeerGoneError):
        await remote.expose("text/plain")


@pytest.mark.parametrize("refusal", [None, bad_request("caps.x", "no")])
async def test_a_change_has_the_outcome_that_the_first_process_says(
    refusal: ApiError | None,
) -> None:
    ours, theirs = (Link(each) for each in Pipe())

    def change(asked: SpeculativeChange, from_built_in: bool) -> Any:
        answer: Future[Any] = Future()
        if refusal is not None:
            raise refusal
        answer.set_result((asked.defaults, from_built_in))
        return answer

    theirs.listen_in_thread({"change": change}, nothing)
    ours.listen_in_thread({}, nothing)
    asked = change_remotely(ours, SpeculativeChange(), from_built_in=True)
    if refusal is None:
        assert await asked == (None, True)
    else:
        with pytest.raises(ApiError) as refused:
            await asked
        assert refused.value.param == "caps.x"


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


def told(num_workers: int) -> tuple[Workers, list[Process], list[Any]]:
    """Workers that only hear of changes, and what the metrics show."""
    shown: list[Any] = []
    resolver = SpeculativeResolver(engine_info(), SpeculativeField(), SpeculativeCaps())
    found = metrics()
    found.show_speculation = lambda *said: shown.append(said)  # type: ignore[method-assign]
    given: Any = SimpleNamespace(info=None)
    parent = Workers(num_workers, given, given, given, found, resolver, ResponseStore(0))
    others = [Process() for _ in range(num_workers)]
    parent._workers = [SimpleNamespace(link=each) for each in others]  # type: ignore[misc]
    return parent, others, shown


def wish(drafter: str) -> SpeculativeChange:
    return SpeculativeChange(**{"defaults": {"draft_strategy": drafter}})  # type: ignore[arg-type]


def test_the_answer_waits_until_everybody_goes_by_the_change() -> None:
    subject, workers, shown = told(3)
    answer = subject.change(wish("nasd"), False)
    assert [each.drafters for each in workers] == [["nasd"]] * 3
    workers[0].answers[0].set_result(None)
    workers[1].answers[0].set_result(None)
    assert not answer.done()
    workers[2].answers[0].set_exception(PeerGoneError())
    assert answer.result(0) is subject._resolver
    assert subject._resolver.defaults.draft_strategy == "nasd"
    assert [(options.draft_strategy, is_change) for options, is_change in shown] == [("nasd", True)]


def test_changes_are_told_in_order_and_answered_each() -> None:
    subject, workers, _ = told(2)
    answers = [subject.change(wish(name), False) for name in ("nasd", "none")]
    assert [each.drafters for each in workers] == [["nasd", "none"]] * 2
    for each in workers:
        each.answers[1].set_result(None)
    assert [each.done() for each in answers] == [False, True]


def test_what_does_not_fit_is_told_to_nobody_but_its_sender() -> None:
    subject, (other,), shown = told(1)
    before = subject._resolver
    with pytest.raises(ApiError) as refused:
        subject.change(wish("eagle3"), False)
    assert refused.value.param == "defaults.draft_strategy"
    assert (other.asked, subject._resolver, shown) == ([], before, [])
