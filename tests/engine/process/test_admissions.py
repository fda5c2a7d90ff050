"""Requests that wait for their grammar."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import Pipe

import pytest

from engine.process.admissions import SlowAdmissions
from engine.process.child import EngineHost
from engine.process.client import RemoteEngine
from engine.request.errors import QueueFullError
from engine.request.params import GenerationRequest, SamplingParams
from worlds.gated_engine import HANG, Engine, until, within


class Office:
    """Admits what it is let, and notes it."""

    def __init__(self) -> None:
        self.admitted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.aborted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.go_on = threading.Event()
        self.left_out: list[str] = []
        self.slow = SlowAdmissions[object](
            self._admit, self.aborted.put, lambda _, name: self.left_out.append(name)
        )

    def _admit(self, client: object, request: GenerationRequest) -> None:
        assert client is not None
        self.begun.put(request.request_id)
        self.go_on.wait()
        self.admitted.put(request.request_id)

    def put(self, name: str, client: object = None) -> None:
        self.slow.put(client or self, GenerationRequest(name, (1,), SamplingParams(grammar="g")))


def test_one_that_is_aborted_while_it_is_admitted_is_ended_then() -> None:
    office = Office()
    office.put("a")
    assert office.begun.get() == "a"
    assert office.slow.forget_one("a")
    office.go_on.set()
    assert office.admitted.get() == "a"
    assert office.aborted.get() == "a"
    assert office.left_out == [], "its last event comes of its end"


def test_one_that_is_aborted_before_is_not_admitted() -> None:
    office = Office()
    gone = object()
    for name in "abcd":  # a thread each
        office.put(name)
    assert sorted(office.begun.get() for _ in range(4)) == [*"abcd"]
    office.put("left", gone)
    office.put("aborted")
    office.put("last")
    office.slow.forget(gone)
    assert office.slow.forget_one("aborted")
    assert not office.slow.forget_one("aborted")
    assert office.left_out == ["aborted"]
    office.go_on.set()
    assert sorted(office.admitted.get() for _ in range(5)) == ["a", "b", "c", "d", "last"]
    assert office.aborted.empty()


def asked(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1,), SamplingParams(grammar="g"))


@asynccontextmanager
async def beside(office: Office, max_num_open: int = 100) -> AsyncIterator[RemoteEngine]:
    """A client of a host whose admissions are the office's, which has begun with one for each thread."""
    host, runtime = EngineHost(), Engine(max_num_open=max_num_open).runtime
    host._built.set_result(runtime)
    host._slow._admit = office._admit  # type: ignore[assignment, method-assign]
    ours, theirs = Pipe()
    host.attach(False, theirs.fileno())
    theirs._handle = None  # the host's from now on
    engine = RemoteEngine(runtime.info, ours)
    await engine.start()
    for name in "abcd":
        engine._submit(asked(name))
    assert sorted(office.begun.get() for _ in range(4)) == [*"abcd"]
    engine._unfinished.clear()
    yield engine
    office.go_on.set()
    await engine.stop()


@within(HANG)
async def test_one_that_is_aborted_before_has_a_last_event() -> None:
    """Else the server waited half a minute for it when it ended."""
    async with beside(Office()) as engine:
        reading = asyncio.ensure_future(engine.stream(asked("e"), lambda _: None))
        await until(lambda: engine.num_open == 1)
        reading.cancel()
        await until(lambda: not engine._unfinished)


@within(HANG)
async def test_those_that_wait_take_places_in_the_queue() -> None:
    async with beside(Office(), max_num_open=4) as engine:
        with pytest.raises(QueueFullError):
            await engine.stream(asked("e"), lambda _: None)
