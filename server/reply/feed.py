"""Several choices at once, as one stream of deltas in the order in which they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.types import Receive

from server.reply.choices import ChoiceDelta

_QUEUE_PER_SOURCE = 8
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client hung up before its answer was ready."""


class DeltaFeed:
    """Reads all sources at once; a client that reads slowly slows its own sources only.

    ``aclose`` closes every source, which aborts what still runs; call it however reading ended.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> None:
        self._queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(
            _QUEUE_PER_SOURCE * len(sources)
        )
        self._num_open = len(sources)
        self._peeked: list[ChoiceDelta | Exception | None] = []
        self._tasks = [asyncio.ensure_future(self._pump(source)) for source in sources]

    async def _pump(self, source: AsyncGenerator[ChoiceDelta, None]) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    await self._queue.put(delta)
        except Exception as error:
            # Told to the reader, who decides what the client hears.
            ending = error
        await self._queue.put(ending)

    async def peek(self, seconds: float) -> None:
        """Waits for the first delta, at most so long. Raises the error if one comes first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                self._peeked.append(await self._queue.get())
        if self._peeked and isinstance(self._peeked[0], Exception):
            raise self._peeked[0]

    async def next(self) -> ChoiceDelta | None:
        """The next delta, or None after the last. Raises the error of any source. Safe to
        cancel.
        """
        while self._num_open:
            item = self._peeked.pop() if self._peeked else await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._num_open -= 1
        return None

    async def collect(self) -> list[ChoiceDelta]:
        """All deltas to the end."""
        deltas = []
        while (delta := await self.next()) is not None:
            deltas.append(delta)
        return deltas

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def unless_client_leaves(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """The outcome of ``work``, which is cancelled when the client disconnects.

    Raises ClientGoneError then. The request's body has to have been read before.
    """
    working = asyncio.ensure_future(work())
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return await working
    finally:
        tasks = [task for task in (working, watching) if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
