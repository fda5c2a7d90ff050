"""Runs a request's choices at once and answers with a stream of events or with one JSON object.

The reply's status is settled before its first byte: a stream's head waits for the first token, but
not longer than ``ADMISSION_SECONDS``, so that a full queue is a 429 and not an event. Later errors
become an ``{"error": ...}`` event before ``[DONE]``. However a reply ends, its unfinished choices
are aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from engine.logs import add_log_fields
from server.errors import CLIENT_GONE_STATUS, REQUEST_ID_KEY, ApiError, to_api_error
from server.http.protocol import SEND_BODY, SendBody
from server.metrics.record import RECORD_KEY, ChoiceRecord, RequestRecord
from server.plan import ChoicePlan, RequestPlan, ignored_header
from server.reply.deltas import ChoiceDelta, ChoiceEnd, Sink, fold
from server.reply.usage import Usage, build_usage
from server.reply.writers import WholeWriter, Writer

logger = logging.getLogger("slipstream.requests")

ADMISSION_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0

T = TypeVar("T")
Run = Callable[[ChoicePlan, Sink, ChoiceRecord | None], Awaitable[None]]
"""Runs a choice to its end: ``ChoiceSource.run``."""
Account = Callable[[Sequence[ChoiceEnd]], Usage]


class ClientGoneError(Exception):
    """The client hung up before its answer was ready."""


class DeltaFeed:
    """Runs all of a request's choices at once, each in a task that also takes its deltas where they go: a
    delta wakes one task, and a client that reads slowly slows its own choices only.

    ``aclose`` aborts what still runs; call it however reading ended.
    """

    def __init__(self, run: Run, plan: RequestPlan, record: RequestRecord | None) -> None:
        self._sink: Sink | None = None
        self._wanted = asyncio.Event()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        records = [None] * len(plan.choices) if record is None else record.choices
        seats = asyncio.Semaphore(plan.num_at_once)

        async def run_seated(choice: ChoicePlan, record: ChoiceRecord | None) -> None:
            async with seats:
                await run(choice, self._take, record)

        self._tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(run_seated(choice, each))
            for choice, each in zip(plan.choices, records, strict=True)
        ]

    def _take(self, delta: ChoiceDelta) -> Coroutine[Any, Any, None] | None:
        return self._keep(delta) if self._sink is None else self._sink(delta)

    async def _keep(self, delta: ChoiceDelta) -> None:
        """Until deltas are wanted."""
        if not self._begun.done():
            self._begun.set_result(None)
        await self._wanted.wait()
        assert self._sink is not None
        if (wait := self._sink(delta)) is not None:
            await wait

    async def peek(self, seconds: float) -> None:
        """Waits for the first delta, at most so long. Raises the error if one comes first."""
        waiting = (self._begun, *self._tasks)
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._begun.done():
            self._raise_first()

    async def run(self, sink: Sink, pause: float | None = None) -> bool:
        """All deltas into ``sink``, those of a choice in order, for ``pause`` seconds at most. Returns
        whether that was all. Raises the first error of any choice."""
        self._sink = sink
        self._wanted.set()
        _, running = await asyncio.wait(
            self._tasks, timeout=pause, return_when=asyncio.FIRST_EXCEPTION
        )
        self._raise_first()
        return not running

    async def collect(self) -> list[ChoiceDelta]:
        """Returns each choice whole, as one delta, in index order."""
        deltas: list[list[ChoiceDelta]] = [[] for _ in self._tasks]

        def keep(delta: ChoiceDelta) -> None:
            deltas[delta.index].append(delta)

        await self.run(keep)
        return [fold(index, found) for index, found in enumerate(deltas)]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _raise_first(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()


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


class DeltaStreamResponse(StreamingResponse):
    """A reply in pieces, with one that says nothing in every pause in which proxies might hang up. Its
    choices are aborted as soon as it ends, by whatever end. ``account`` makes the usage of the choices'
    ends."""

    def __init__(
        self, feed: DeltaFeed, writer: Writer, account: Account, headers: Mapping[str, str]
    ) -> None:
        # No proxy may hold events back.
        unheld = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), headers={**headers, **unheld}, media_type=writer.media_type)
        self._feed = feed
        self._writer = writer
        self._account = account
        self._send: SendBody
        self._ends: dict[int, ChoiceEnd] = {}
        self._time = asyncio.get_running_loop().time
        self._latest = self._time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = scope.get(SEND_BODY) or partial(_send_body, send)
        start = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **start})
            with suppress(ClientGoneError):
                await unless_client_leaves(receive, lambda: self._write(send))
        finally:
            await self._feed.aclose()

    async def _write(self, send: Send) -> None:
        """The whole stream."""
        try:
            if content := self._writer.begin():
                await self._write_through(content)
            while not await self._feed.run(self._take, max(0.0, self._pause())):
                if self._pause() <= 0:
                    await self._write_through(self._writer.pause())
            ends = [self._ends[index] for index in sorted(self._ends)]
            last = self._writer.finish(self._account(ends))
            await self._writer.settle()
        except Exception as error:
            # The status has been sent: the error can only go into the stream.
            last = self._failure(to_api_error(error))
        await self._write_through(last + self._writer.ending)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failure(self, error: ApiError) -> bytes:
        try:
            return self._writer.failure(error)
        except Exception:
            # What cannot be written may be what the writer shows beside the error.
            logger.exception("an error could not be told in the form of its endpoint")
            return self._writer.bare_failure(error)

    def _pause(self) -> float:
        """Returns the seconds until something has to be sent."""
        return self._latest + KEEPALIVE_SECONDS - self._time()

    def _take(self, delta: ChoiceDelta) -> Coroutine[Any, Any, None] | None:
        if delta.end is not None:
            self._ends[delta.index] = delta.end
        content = self._writer.events(delta)
        if not content:
            return None
        self._latest = self._time()
        return self._send(content)

    async def _write_through(self, content: bytes) -> None:
        self._latest = self._time()
        if (wait := self._send(content)) is not None:
            await wait


async def _send_body(send: Send, content: bytes) -> None:
    """Stands in for ``SEND_BODY`` where the application is not behind our protocol."""
    await send({"type": "http.response.body", "body": content, "more_body": True})


async def answer(request: Request, run: Run, writer: WholeWriter) -> Response:
    """The response to a request whose plan ``writer`` has, a stream where the plan says so. Raises
    ApiError or EngineError if the request fails before the reply has begun."""
    plan = writer.plan
    add_log_fields(
        request_id=plan.request_id,
        **plan.logged,
        adapter=plan.adapter,
        tenant=plan.choices[0].request.tenant.name or None,
    )
    record: RequestRecord | None = request.scope.get(RECORD_KEY)
    if record is not None:
        record.begin(plan)
    account = partial(_account, plan, request.scope.get(REQUEST_ID_KEY))
    headers = ignored_header(plan.ignored)
    feed = DeltaFeed(run, plan, record)
    try:
        if plan.stream:
            assert isinstance(writer, Writer), "only what can be streamed has the field"
            await unless_client_leaves(request.receive, lambda: feed.peek(ADMISSION_SECONDS))
            return DeltaStreamResponse(feed, writer, account, headers)
        choices = await unless_client_leaves(request.receive, feed.collect)
    except ClientGoneError:
        await feed.aclose()
        return Response(status_code=CLIENT_GONE_STATUS)
    except BaseException:
        await feed.aclose()
        raise
    usage = account([choice.end for choice in choices if choice.end is not None])
    content = to_json(writer.reply(choices, usage), inf_nan_mode="null")
    await writer.settle()
    return Response(
        content,
        headers=headers,
        media_type="application/json",
    )


def _account(plan: RequestPlan, sender: str | None, ends: Sequence[ChoiceEnd]) -> Usage:
    """The request's usage, which also goes to the log, next to its sender."""
    usage = build_usage(plan, ends)
    spec = usage["speculative"]
    logger.info(
        "%s x-request-id=%s%s prompt=%d completion=%d finish=%s drafter=%s accepted=%d/%d",
        plan.request_id,
        sender,
        "".join(f" {name}={value!r}" for name, value in plan.logged.items()),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        ",".join(end.reason for end in ends),
        spec["drafter"],
        spec["num_accepted_tokens"],
        spec["num_draft_tokens"],
        extra={"fields": _figures(usage, ends)},
    )
    return usage


def _figures(usage: Usage, ends: Sequence[ChoiceEnd]) -> dict[str, Any]:
    """Returns the figures that the log has of a request. Times are its slowest choice's, in seconds."""
    spec = usage["speculative"]
    infos = [end.info for end in ends]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish_reasons": [end.reason for end in ends],
        "drafter": spec["drafter"],
        "num_draft_tokens": spec["num_draft_tokens"],
        "num_accepted_tokens": spec["num_accepted_tokens"],
        "queue_seconds": max(each.queue_seconds for each in infos),
        "time_to_first_token_seconds": max(each.time_to_first_token_seconds for each in infos),
        "e2e_seconds": max(each.e2e_seconds for each in infos),
    }
