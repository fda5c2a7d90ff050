"""Requests, answers and errors as they go between ingress and replicas, and the application run on
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from server.errors import ApiError

RETRY_SECONDS = 1


@dataclass(slots=True)
class Choice:
    """The router's word on a request, which it gives in the ingress's process. ``home``: the replica that
    the request's key belongs to."""

    home: str | None = None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request on its way to a replica. ``scope``: ASGI's, as far as another process can take it;
    ``key``: of those that belong together; ``avoid``: replicas that could not answer it."""

    scope: dict[str, Any]
    body: bytes
    key: str | None = None
    avoid: frozenset[str] = frozenset()
    choice: Choice = field(default_factory=Choice)


@dataclass(frozen=True, slots=True)
class Whole:
    """A replica's answer to a request that all of them got."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def answers(app: ASGIApp, request: Forwarded) -> AsyncGenerator[list[Message], None]:
    """Yields the application's answer, in lists of what has come since the last one. Closing or
    cancelling it ends the request."""
    exchange = _Exchange(request.body)
    scope = {**request.scope, "asgi": {"version": "3.0"}, "state": {}}
    running: asyncio.Future[None] = asyncio.ensure_future(
        app(scope, exchange.receive, exchange.send)
    )
    running.add_done_callback(exchange.end)
    try:
        async for messages in exchange.messages():
            yield messages
        await running
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def whole_answer(app: ASGIApp, request: Forwarded, replica: str) -> Whole:
    """The application's answer as one."""
    head: Message = {}
    body = b""
    async with aclosing(answers(app, request)) as found:
        async for messages in found:
            for message in messages:
                if message["type"] == "http.response.start":
                    head = message
                body += message.get("body", b"")
    return Whole(replica, head["status"], list(head["headers"]), body)


class _Exchange:
    """One request and its answer, between the application and the reader of its messages."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._sent: list[Message] = []
        self._news = asyncio.Event()
        self._has_ended = False

    async def receive(self) -> Message:
        """ASGI's: the body; then nothing, since who leaves cancels."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        self._sent.append(message)
        self._news.set()

    def end(self, _: object) -> None:
        """The application has returned."""
        self._has_ended = True
        self._news.set()

    async def messages(self) -> AsyncIterator[list[Message]]:
        """Yields what was sent since the last time, to the end."""
        while self._sent or not self._has_ended:
            await self._news.wait()
            self._news.clear()
            if self._sent:
                sent, self._sent = self._sent, []
                yield sent


class ReplicaLostError(Exception):
    """The replica ended, or cannot go on, before its answer did."""


def replica_lost() -> ApiError:
    """Returns the error where nobody could answer, or an answer that has begun cannot go on."""
    return ApiError(
        503,
        "The replica that had this request is gone. Send it again: with the same seed it gets the same "
        "text.",
        code="replica_lost",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def too_many_waiting() -> ApiError:
    """Serve's own queue before the replicas is full."""
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(429, "Too many requests wait.", code="queue_full", headers=headers)


def not_adopted() -> ApiError:
    """Returns the error of a change that is for all replicas."""
    message = "Not all replicas took the change. Send it again."
    return ApiError(503, message, code="not_adopted")
