"""The ingress: an ASGI application in front of the replicas, with no state but what it counts.

It reads a request whole, finds where it belongs, and passes on what the replica answers. A request
whose replica is gone before anything was written goes to another one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from deploy.ray.affinity import affinity_key
from deploy.ray.answer import Answer
from deploy.ray.exchange import Forwarded, ReplicaLostError, Whole, not_adopted, replica_lost
from deploy.ray.figures import HOME, SPILLED, UNKEYED, Figures, merge
from server.errors import ApiError, body_too_large, to_api_error
from server.http.middleware import BodyLimitMiddleware
from server.reply.streaming import ClientGoneError, unless_client_leaves

# How often a request may lose its replica.
ATTEMPTS = 3
# What of an ASGI scope another process can take.
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path",
          "query_string", "headers", "client", "server")  # fmt: skip


class Replicas(Protocol):
    """The replicas behind the ingress."""

    def answer(self, request: Forwarded) -> AsyncGenerator[str | list[Message], None]:
        """The name of the replica that was chosen, then ASGI messages in lists. Closing it tells the
        replica that the client has left. Raises ReplicaLostError, ApiError."""

    async def ask_all(self, request: Forwarded) -> list[Whole]:
        """The answers of those that answer."""

    async def max_body_bytes(self) -> int:
        """The longest body that they take."""


class Gateway:
    """``num_characters``: of a text's beginning, by which requests are kept together. ``name``: which
    ingress it is, in its metrics."""

    def __init__(self, replicas: Replicas, num_characters: int, name: str) -> None:
        self._replicas = replicas
        self._num_characters = num_characters
        self._name = name
        self._figures = Figures()
        self._limited: BodyLimitMiddleware | None = None

    def app(self) -> Starlette:
        """The application; it has started when a replica has."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            most = await self._replicas.max_body_bytes()
            self._limited = BodyLimitMiddleware(self._answer, most)
            yield

        return Starlette(routes=[Mount("/", app=self._limit)], lifespan=lifespan)

    async def _limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._limited is not None
        await self._limited(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await self._read(scope, receive)
        except HTTPException:
            await body_too_large().response(scope)(scope, receive, send)
            return
        if request is None:
            return
        path, is_get = request.scope["path"], scope["method"] == "GET"
        try:
            if is_get and path == "/metrics":
                response = await self._metrics(request)
            elif (is_get and path in ("/health", "/ready")) or _is_of_kept(request):
                response = await self._any(request)
            elif not is_get and path.startswith("/admin/"):
                response = await self._all(request)
            else:
                await unless_client_leaves(receive, lambda: self._forward(request, send))
                return
        except ClientGoneError:
            return
        except ApiError as error:
            self._figures.error(error.code)
            response = error.response(request.scope)
        await response(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> Forwarded | None:
        """The request, whole; None where the client left meanwhile. Raises HTTPException where it is too
        long."""
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        # Guards look at whole paths, so what Serve has put before them stays here.
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        kept |= {"path": path, "raw_path": path.encode(), "root_path": ""}
        key = affinity_key(path, scope["headers"], body, self._num_characters)
        return Forwarded(kept, body, key)

    async def _forward(self, request: Forwarded, send: Send) -> None:
        answer = Answer(send, request.scope)
        try:
            error = await self._ask_in_turn(request, answer)
            if error is not None and not answer.has_begun:
                self._figures.error(error.code)
            if error is not None:
                await answer.fail(error)
        finally:
            if answer.is_lost:
                self._figures.lost_stream()

    async def _ask_in_turn(self, request: Forwarded, answer: Answer) -> ApiError | None:
        """One replica after the other, until one has answered; the error where none has."""
        for attempt in range(ATTEMPTS):
            with self._figures.sent(is_first=attempt == 0) as taken:
                async with aclosing(self._replicas.answer(request)) as messages:
                    try:
                        async for found in messages:
                            if isinstance(found, str):
                                taken(found, _route(request, found))
                                request = replace(request, avoid=request.avoid | {found})
                                continue
                            for message in found:
                                await answer.take(message)
                        return None
                    except ReplicaLostError:
                        if answer.has_begun:
                            break
                    except Exception as error:
                        return to_api_error(error)
        return replica_lost()

    async def _metrics(self, request: Forwarded) -> Response:
        # In the format that can be merged, whatever the client would rather have.
        headers = [each for each in request.scope["headers"] if each[0] != b"accept"]
        plain = replace(request, scope={**request.scope, "headers": headers})
        found = await self._replicas.ask_all(plain)
        content = merge({each.replica: each.body.decode() for each in found if each.status == 200})
        own = self._figures.text([each.replica for each in found])
        content += merge({self._name: own}, "ingress")
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _any(self, request: Forwarded) -> Response:
        """Answers as the replica that says best: all is well while one is, and one keeps a response."""
        found = await self._replicas.ask_all(request)
        if not found:
            raise replica_lost()
        return _response(min(found, key=lambda each: each.status))

    async def _all(self, request: Forwarded) -> Response:
        """Answers changes, which are made where all replicas say the same."""
        found = await self._replicas.ask_all(request)
        if len({each.status for each in found}) != 1:
            raise not_adopted()
        return _response(found[0])


def _is_of_kept(request: Forwarded) -> bool:
    """Whether it is about a response that a replica keeps."""
    scope = request.scope
    return scope["path"].startswith("/v1/responses/") and scope["method"] in ("GET", "DELETE")


def _route(request: Forwarded, replica: str) -> str:
    if request.key is None:
        return UNKEYED
    return HOME if replica == request.choice.home else SPILLED


def _response(found: Whole) -> Response:
    response = Response(found.body, found.status)
    response.raw_headers[:] = found.headers
    return response
