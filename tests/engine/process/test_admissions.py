"""Requests that wait for their grammar."""

from __future__ import annotations

import asyncio
import queue
import threading
from multiprocessing import Pipe

from engine.process.admissions import SlowAdmissions
from engine.process.child import EngineHost
from engine.process.client import RemoteEngine
from engine.request.params import GenerationRequest, SamplingParams
from worlds.gated_engine import until
from worlds.scripted_engine import ScriptedEngine


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


async def test_one_that_is_aborted_before_has_a_last_event() -> None:
    """Else the server waited half a minute for it when it ended."""
    office, host = Office(), EngineHost()
    host._slow._admit = office._admit  # type: ignore[assignment, method-assign]
    ours, theirs = Pipe()
    host.attach(False, theirs.fileno())
    theirs._handle = None  # the host's from now on
    engine = RemoteEngine(ScriptedEngine().info, ours)
    await engine.start()

    def asked(name: str) -> GenerationRequest:
        return GenerationRequest(name, (1,), SamplingParams(grammar="g"))

    for name in "abcd":  # a thread each
        host._submit(next(iter(host._clients)), asked(name))
    assert sorted(office.begun.get() for _ in range(4)) == [*"abcd"]
    reading = asyncio.ensure_future(engine.stream(asked("e"), lambda _: None))
    await until(lambda: "e" in host._slow._waiting)
    reading.cancel()
    await until(lambda: not engine._unfinished)
    office.go_on.set()
    await engine.stop()
