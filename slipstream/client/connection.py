"""Requests to a server of OpenAI's API, with every failure in words."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import httpx

from slipstream.client.errors import ClientError, RefusedError
from slipstream.client.stream import DONE, Piece, explain, parse_event

CONNECT_SECONDS = 10.0
_ATTEMPTS = 5
_Found = TypeVar("_Found")
_DATA = "data:"
_KEY = re.compile("[ -~]*[!-~]")


class Connection:
    """A server's address and key. Use as an async context manager; calls may run side by side.

    Every method raises ClientError, and nothing else, for whatever the network or the server does.
    """

    def __init__(self, url: str, api_key: str | None = None, silence_seconds: float = 300) -> None:
        """``silence_seconds``: how long the server may be silent; its pings every 15 s count as
        speech. Raises ClientError where ``url`` is none, and for a key that no header can carry."""
        self.url = base_url(url)
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise ClientError("the API key is empty, or has characters that no header can carry")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS),
                # As many at once as the caller starts: a queue here would hide in the timings.
                limits=httpx.Limits(max_connections=None),
            )
        except ValueError as error:  # of variables that name a proxy
            raise ClientError(f"no connection can be made: {error}") from error

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        return self._client.base_url.host in ("localhost", "127.0.0.1", "::1")

    async def get(self, path: str) -> Any:
        """The JSON that a GET of ``path`` answers with. Raises RefusedError for a status other than
        200."""
        with _in_words(self.url):
            response = await self._client.get(path)
            _check(response)
            return _json(response)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a whole reply. Raises RefusedError for a status other than 200."""
        with _in_words(self.url):
            async with self._post(path, body) as response:
                await response.aread()
                return _json(response)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """The pieces of a reply; the last one carries the usage. Closing the iterator aborts the
        request. Raises RefusedError for a status other than 200."""
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with _in_words(self.url):
            async with self._post(path, wanted) as response:
                complete = False
                async for line in _lines(response):
                    if not line.startswith(_DATA):
                        continue
                    data = line.removeprefix(_DATA).strip()
                    if data == DONE:
                        complete = True
                        break
                    yield parse_event(data)
                if not complete:
                    raise ClientError("the server broke the reply off")

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        try:
            request = self._client.build_request("POST", path, json=body)
        except ValueError as error:
            message = "the request has numbers that are not finite, or halves of characters"
            raise ClientError(message) from error
        async with aclosing(await self._client.send(request, stream=True)) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
            _check(response)
            yield response


async def patiently(ask: Callable[[], Awaitable[_Found]]) -> _Found:
    """Returns the result of ``ask``, retrying while the server is busy. Raises as ``ask`` does."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return await ask()
        except RefusedError as error:
            if not error.is_busy:
                raise
        await asyncio.sleep(attempt)
    return await ask()


async def side_by_side(count: int, work: Iterable[Callable[[], Awaitable[Any]]]) -> None:
    """Does all of it in its order, ``count`` pieces at a time. A failure ends all: raises ClientError."""
    waiting = iter(work)

    async def go_on() -> None:
        for each in waiting:
            await each()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(go_on())
    except BaseExceptionGroup as errors:
        first, others = errors.split(ClientError)
        if first is None or others is not None:
            raise
        # Within ``except*`` Pythons before 3.11.4 make a group of what is raised.
        raise first.exceptions[0] from errors


def base_url(url: str) -> str:
    """``url`` without the path that OpenAI's clients want behind it. Raises ClientError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ClientError(f"{url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientError(f"{url!r} is not an address: it should look like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yields the lines of events: they end at line feeds, and not at what else httpx takes for a line's
    end, which JSON may hold as it is."""
    rest = ""
    async for text in response.aiter_text():
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            yield line
    yield rest


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """Turns httpx's errors into ClientError."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ClientError(
            f"no server answers at {url} ({error or 'no connection in time'}); "
            "`slipstream serve` starts one, --url names another"
        ) from error
    except httpx.TimeoutException as error:
        raise ClientError(f"{url} has fallen silent; --timeout waits longer") from error
    except httpx.HTTPError as error:
        raise ClientError(f"the connection to {url} was lost") from error


def _check(response: httpx.Response) -> None:
    """Raises ClientError for anything but success."""
    status = response.status_code
    if status == httpx.codes.OK:
        return
    try:
        message = explain(json.loads(response.content))
    except ValueError:
        message = f"{response.request.url} answered with status {status} and no reason"
    if status == httpx.codes.UNAUTHORIZED:
        message += " (here: --api-key, or the variable SLIPSTREAM_API_KEY)"
    if status == httpx.codes.TOO_MANY_REQUESTS and "retry-after" in response.headers:
        message += f" (the server suggests to wait {response.headers['retry-after']} s)"
    raise RefusedError(message, status)


def _json(response: httpx.Response) -> Any:
    try:
        return json.loads(response.content)
    except ValueError as error:
        raise ClientError(f"{response.request.url} did not answer with JSON") from error
