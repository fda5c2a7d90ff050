"""What a worker asks the process that launched it, over a pipe in one process."""

from __future__ import annotations

from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any

import pytest

from engine.process.launch import Child
from engine.process.link import Link, PeerGoneError
from server.errors import ApiError, bad_request
from server.metrics.prometheus import Metrics
from server.request.live_speculation import SpeculativeChange
from server.workers.child import RemoteMetrics, RemoteSpeculation
from server.workers.parent import Workers, _Worker
from worlds.scripted_engine import engine_info

pytestmark = pytest.mark.anyio


class Parent(Workers):
    """Acts as ``Workers`` do, with metrics that may fail."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics


def nothing() -> None:
    """Of a peer that has gone."""


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
    asked = RemoteSpeculation(ours)(SpeculativeChange(), from_built_in=True)
    if refusal is None:
        assert await asked == (None, True)
    else:
        with pytest.raises(ApiError) as refused:
            await asked
        assert refused.value.param == "caps.x"
