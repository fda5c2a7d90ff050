"""Events handed over as they come: in order, one after the other, and to nobody who has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.process.streams import EventStreams, Take
from engine.request.errors import EngineDeadError, RequestFailedError
from engine.request.events import ErrorEvent, FinishInfo, TokenEvent
from engine.request.params import GenerationRequest, Tenant
from engine.request.stats import RequestStats
from worlds.gated_engine import HANG, within
from worlds.scripted_engine import engine_info

REQUEST = GenerationRequest("r", (1, 2, 3))
END = FinishInfo("length", None, 3, 0, 1, RequestStats(), 0.0, 0.0, 0.0, 0.0)


class Streams(EventStreams):
    """Delivers what the test says."""

    def __init__(self) -> None:
        super().__init__(engine_info())
        self.aborted: list[str] = []

    async def charge(self, tenant: Tenant) -> None:
        del tenant

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def _submit(self, request: GenerationRequest) -> None:
        pass

    async def _end(self) -> None:
        pass

    def say(self, *token_ids: int, is_last: bool = False) -> None:
        for token_id in token_ids:
            finish = END if is_last and token_id == token_ids[-1] else None
            self._deliver([TokenEvent("r", (token_id,), (False,), finish=finish)])

    def fail(self, error: Exception) -> None:
        self._deliver([ErrorEvent("r", error)])  # type: ignore[arg-type]


class Reader:
    """Takes tokens, and waits after those that are in ``slow`` until ``go`` is set."""

    def __init__(self, slow: tuple[int, ...] = ()) -> None:
        self.taken: list[int] = []
        self.go = asyncio.Event()
        self._slow = slow

    def __call__(self, event: TokenEvent) -> Coroutine[Any, Any, None] | None:
        (token_id,) = event.token_ids
        if token_id in self._slow:
            return self._wait(token_id)
        self.taken.append(token_id)
        return None

    async def _wait(self, token_id: int) -> None:
        await self.go.wait()
        self.taken.append(token_id)


async def begun(take: Take) -> tuple[Streams, asyncio.Task[None]]:
    streams = Streams()
    await streams.start()
    task = asyncio.create_task(streams.stream(REQUEST, take))
    await turns()
    return streams, task


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@within(HANG)
async def test_an_event_is_taken_when_it_is_delivered() -> None:
    reader = Reader()
    streams, task = await begun(reader)
    streams.say(1)
    assert reader.taken == [1]
    streams.say(2, 3, is_last=True)
    assert reader.taken == [1, 2, 3]
    await task
    assert streams.num_open == 0
    assert streams.aborted == []


@within(HANG)
async def test_events_wait_for_one_that_takes_its_time() -> None:
    reader = Reader(slow=(2, 4))
    streams, task = await begun(reader)
    streams.say(1, 2, 3)
    await turns()
    assert reader.taken == [1]
    reader.go.set()
    await turns()
    assert reader.taken == [1, 2, 3]
    streams.say(4, is_last=True)
    await task
    assert reader.taken == [1, 2, 3, 4]


@within(HANG)
async def test_what_came_before_anybody_listened_is_taken_first() -> None:
    reader = Reader()
    streams = Streams()
    await streams.start()
    with streams._open(REQUEST) as stream:
        streams.say(1, 2)
        task = asyncio.create_task(stream.hand_to(reader))
        await turns()
        streams.say(3, is_last=True)
        await task
    assert reader.taken == [1, 2, 3]


@pytest.mark.parametrize("slow", [(), (1,)])
@within(HANG)
async def test_who_leaves_takes_nothing_more_and_aborts(slow: tuple[int, ...]) -> None:
    reader = Reader(slow)
    streams, task = await begun(reader)
    streams.say(1)
    task.cancel()
    streams.say(2)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reader.taken == ([] if slow else [1])
    assert streams.aborted == ["r"]
    assert streams.num_open == 0


@within(HANG)
async def test_an_error_ends_the_stream_after_what_came_before_it() -> None:
    reader = Reader()
    streams, task = await begun(reader)
    streams.say(1)
    streams.fail(RequestFailedError("it broke"))
    # Whoever fails what is open need not know what has ended.
    streams.fail(EngineDeadError("dead"))
    with pytest.raises(RequestFailedError):
        await task
    assert reader.taken == [1]
    assert streams.aborted == []


@pytest.mark.parametrize("first", [(), (1,)])
@within(HANG)
async def test_what_a_reader_raises_ends_its_stream_alone(first: tuple[int, ...]) -> None:
    def take(event: TokenEvent) -> None:
        if event.token_ids not in {(each,) for each in first}:
            raise ZeroDivisionError

    streams, task = await begun(take)
    streams.say(*first, 2, 3)
    with pytest.raises(ZeroDivisionError):
        await task
    assert streams.aborted == ["r"]
