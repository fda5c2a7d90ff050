"""Runs a request's choices at once and answers with a stream of events or with one JSON object.

The reply's status is settled before its first byte: a stream's head waits for the first token, but
not longer than ``ADMISSION_SECONDS``, so that a full queue is a 429 and not an event. Later errors
become an ``{"error": ...}`` event before ``[DONE]``. However a reply ends, its unfinished choices
are aborted.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from server.errors import to_api_error
from server.middleware import REQUEST_ID_KEY
from server.reply.choices import ChoiceDelta, ChoiceEnd, ChoiceSource
from server.reply.usage import Usage, build_usage
from server.reply.writers import Writer, fold

logger = logging.getLogger("slipstream.requests")

ADMISSION_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0
CLIENT_GONE_STATUS = 499
_QUEUE_PER_SOURCE = 8
DONE = format_sse_event(data_str="[DONE]")


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
            # For the reader, which decides what is sent.
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


class DeltaStreamResponse(EventSourceResponse):
    """Server-sent events whose choices are aborted as soon as the response ends, by whatever
    end.
    """

    def __init__(self, events: AsyncIterator[bytes], feed: DeltaFeed) -> None:
        # No proxy may hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._feed.aclose()


class Responder:
    """Answers translated requests."""

    def __init__(self, source: ChoiceSource) -> None:
        self._source = source

    async def answer(self, request: Request, writer: Writer) -> Response:
        """Raises ApiError or EngineError if the request fails before the reply has begun."""
        plan = writer.plan
        sender = request.scope.get(REQUEST_ID_KEY)
        feed = DeltaFeed([self._source.stream(choice) for choice in plan.choices])
        try:
            if plan.stream:
                await unless_client_leaves(request.receive, lambda: feed.peek(ADMISSION_SECONDS))
                return DeltaStreamResponse(self._events(feed, writer, sender), feed)
            deltas = await unless_client_leaves(request.receive, feed.collect)
        except ClientGoneError:
            await feed.aclose()
            return Response(status_code=CLIENT_GONE_STATUS)
        except BaseException:
            await feed.aclose()
            raise
        choices = fold(deltas, len(plan.choices))
        ends = [choice.end for choice in choices if choice.end is not None]
        usage = self._usage(writer, ends, sender)
        reply = writer.reply(choices, usage)
        return JSONResponse(reply.model_dump(mode="json", exclude_unset=True))

    async def _events(
        self, feed: DeltaFeed, writer: Writer, sender: str | None
    ) -> AsyncGenerator[bytes, None]:
        ends: dict[int, ChoiceEnd] = {}
        try:
            async with aclosing(_with_pings(feed)) as deltas:
                async for delta in deltas:
                    if delta is None:
                        yield KEEPALIVE_COMMENT
                        continue
                    if delta.end is not None:
                        ends[delta.index] = delta.end
                    chunk = writer.chunk(delta)
                    if chunk is not None:
                        yield format_sse_event(data_str=chunk.model_dump_json(exclude_unset=True))
            usage = self._usage(writer, [ends[index] for index in sorted(ends)], sender)
            if writer.plan.include_usage:
                last = writer.usage_chunk(usage)
                yield format_sse_event(data_str=last.model_dump_json(exclude_unset=True))
        except Exception as error:
            # The status has been sent: the error can only go into the stream.
            yield format_sse_event(data_str=json.dumps(to_api_error(error).body()))
        yield DONE

    def _usage(self, writer: Writer, ends: list[ChoiceEnd], sender: str | None) -> Usage:
        """The request's usage, which also goes to the log, next to who sent it."""
        plan = writer.plan
        usage = build_usage(plan.num_prompt_tokens, ends, plan.n, plan.has_prediction)
        spec = usage.speculative
        logger.info(
            "%s x-request-id=%s user=%r prompt=%d completion=%d finish=%s drafter=%s accepted=%d/%d",
            plan.request_id,
            sender,
            plan.user,
            usage.prompt_tokens,
            usage.completion_tokens,
            ",".join(end.reason for end in ends),
            spec.drafter,
            spec.num_accepted_tokens,
            spec.num_draft_tokens,
        )
        return usage


async def _with_pings(feed: DeltaFeed) -> AsyncGenerator[ChoiceDelta | None, None]:
    """The feed's deltas, with a None for every pause in which proxies might hang up."""
    while True:
        try:
            async with asyncio.timeout(KEEPALIVE_SECONDS) as pause:
                delta = await feed.next()
        except TimeoutError:
            if not pause.expired():
                raise
            yield None
            continue
        if delta is None:
            return
        yield delta
