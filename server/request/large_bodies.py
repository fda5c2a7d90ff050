"""Bodies are read here: small ones on the event loop, large ones in processes of their own: parsed,
checked, templated and tokenized there.

Each of these may take seconds for a body of some megabytes, mostly under the interpreter's lock, and
would keep every other request's tokens waiting. What comes back is what the event loop would have
made of the body: a plan, or the same refusal. Where a process dies, each body that it had is read once
more, in a process of its own: only who ends that one, too, is refused.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from engine.logs import LogOptions
from engine.process.memory import settle_memory
from engine.request.errors import panics_as_errors
from server.errors import CLIENT_GONE_STATUS, ApiError, bad_request, shutting_down
from server.request.body import Body
from server.request.parsing import check_content_type, parse
from server.request.render_limit import LIMIT, SlowTemplateError
from server.request.speculative import SpeculativeResolver
from server.request.translate import Translator
from server.request.wish import Wish

logger = logging.getLogger(__name__)

LARGE = 16 << 10
"""Bytes. A body of no more takes the event loop a few milliseconds at worst."""
_NICENESS = 10
_ENVELOPE_BYTES = 1 << 20
_MOST_BYTES = 4 << 30
"""Bytes of memory of a process that reads bodies, beside those that it begins with."""


def default_body_bytes(max_model_len: int, tokenizer: Any) -> int:
    """Returns the bytes that a body may have: those of two texts that fill the context, the prompt and
    the prediction, and room for all that stands around them."""
    # At least the longest token's bytes, since vocabularies stand for bytes by characters.
    longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
    return _ENVELOPE_BYTES + 2 * max_model_len * longest


@dataclass(frozen=True, slots=True)
class LargeBody:
    """JSON that nobody has looked at, to become a request of this kind; or one already, whose work is
    much all the same."""

    kind: type[Body]
    content: bytes | Body
    drops_unknown: bool = False

    def parse(self) -> Body:
        """Raises ApiError."""
        if isinstance(self.content, Body):
            return self.content
        return parse(self.kind, self.content, drops_unknown=self.drops_unknown)


def wish_of(body: Body | LargeBody, named: str | None) -> Wish:
    """Returns what is asked of the model. ``named``: in the query, for bodies that have no such field.
    Raises ApiError where a large body cannot be read."""
    known = (body.kind if isinstance(body, LargeBody) else type(body)).model_fields
    if "model" not in known:
        return Wish(named)
    fields: Any = None
    if isinstance(body, LargeBody) and isinstance(body.content, bytes):
        try:
            # Some milliseconds for a megabyte.
            fields = from_json(body.content)
        except ValueError:
            body = body.parse()
    if not isinstance(fields, dict):
        fields = {name: getattr(body, name, None) for name in ("model", "keep_alive")}
    keep_alive = fields.get("keep_alive") if "keep_alive" in known else None
    return Wish.of(fields.get("model"), keep_alive, getattr(body, "only_unloads", False))


class BodyRoute(APIRoute):
    """Reads a body of JSON, and hands it to the endpoint as the model that its ``body`` is annotated
    with; a large one unread, as ``LargeBody``. The endpoint's other parameters are the request and
    ``Served``. An endpoint without a ``body`` is FastAPI's own.

    FastAPI's own reading knows neither where a body ceases to be JSON, nor large ones. ``needs_type``: a
    body has to be called JSON.
    """

    needs_type = True

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind: type[Body] | None = get_type_hints(self.endpoint).get("body")
        if kind is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                content = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE_STATUS)
            if self.needs_type:
                check_content_type(request.headers.get("content-type", ""))
            models = request.app.state.models
            # Who operates the server is told of a wrong name in any case.
            drops_unknown = models.settings.unknown_fields == "tell" and not self.path.startswith(
                "/admin"
            )
            unread = LargeBody(kind, content, drops_unknown)
            body = unread if len(content) > LARGE else unread.parse()
            wish = partial(wish_of, body, request.query_params.get("model"))
            async with self._answering(models, request, wish) as found:
                with panics_as_errors():
                    response: Response = await self.endpoint(body, request, found)
                return response

        return handle

    @staticmethod
    def _answering(
        models: Any, request: Request, wish: Callable[[], Wish]
    ) -> AbstractAsyncContextManager[Any]:
        """Returns the endpoint's last parameter."""
        found: AbstractAsyncContextManager[Any] = models.using(request, wish)
        return found


class AnyTypeRoute(BodyRoute):
    """Takes a body for JSON whatever it is called, as Ollama does: ``curl -d`` calls it a form."""

    needs_type = False


class TableRoute(AnyTypeRoute):
    """Is about the server, not one model: the endpoint's last parameter is ``Table``."""

    @staticmethod
    def _answering(
        models: Any, request: Request, wish: Callable[[], Wish]
    ) -> AbstractAsyncContextManager[Any]:
        del request, wish
        return nullcontext(models)


Result = TypeVar("Result")
Work = Callable[[Translator, Any], Result]
"""The work on a body that is a model by then; from a module's top, so that it can be sent."""


def as_it_is(translator: Translator, body: Any) -> Any:
    """Returns the model that the body becomes."""
    del translator
    return body


def _read(translator: Translator, body: Body | LargeBody, work: Work[Result]) -> Result:
    """Where the body goes to no further process. Raises ApiError."""
    LIMIT.is_last = True
    try:
        return work(translator, body.parse() if isinstance(body, LargeBody) else body)
    except SlowTemplateError:
        message = "The chat template takes too long with these messages."
        raise ApiError(500, message, code="chat_template_error") from None
    finally:
        LIMIT.is_last = False


class BodyReader:
    """Works on bodies: on small ones here, on large ones in a pool of ``num_processes``, which
    begins with the first of them or with ``warm``. 0: all here. ``logs``: how they log. The translator's
    resolver and adapters may be replaced at any time."""

    def __init__(
        self, translator: Translator, num_processes: int, logs: LogOptions | None = None
    ) -> None:
        self.translator = translator
        self._num_processes = num_processes
        self._logs = logs or LogOptions()
        self._pool: ProcessPoolExecutor | None = None
        self._pool_processes = _Processes()
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False

    def warm(self) -> None:
        """Begins now, so that the first large body need not wait for it."""
        self._get_pool()

    async def read(self, body: Body | LargeBody, work: Work[Result]) -> Result:
        """Returns the result of ``work`` on the body. Raises ApiError."""
        if not isinstance(body, LargeBody):
            with suppress(SlowTemplateError):
                return work(self.translator, body)
        pool = self._get_pool()
        if pool is None:
            return _read(self.translator, body, work)
        try:
            return await self._read_in(pool, body, work)
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = None
            if self._is_closed:
                raise shutting_down() from None
        logger.warning("a process that read large bodies ended; what it had is read once more")
        async with self._one_at_a_time:
            return await self._read_alone(body, work)

    async def _read_alone(self, body: Body | LargeBody, work: Work[Result]) -> Result:
        """In a new process, which reads nothing else. Raises ApiError, a 400 where that ends, too."""
        pool = self._begin_pool(1)
        if pool is None:
            return _read(self.translator, body, work)
        own, has_begun = self._pool_processes.begun[-1], False
        try:
            await asyncio.get_running_loop().run_in_executor(pool, os.getpid)
            has_begun = True
            return await self._read_in(pool, body, work)
        except BrokenProcessPool:
            if self._is_closed:
                raise shutting_down() from None
            if has_begun:
                message = "Reading this body has ended the process that did it, and another one."
                raise bad_request(None, message, "unreadable_body") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            own.kill()
        logger.warning("no process for large bodies begins: the server reads them itself")
        self._num_processes = 0
        return _read(self.translator, body, work)

    async def _read_in(
        self, pool: ProcessPoolExecutor, body: Body | LargeBody, work: Work[Result]
    ) -> Result:
        """Raises ApiError, and BrokenProcessPool where a process of the pool has ended."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            pool, _read_here, body, work, self.translator.resolver, self.translator.adapters
        )
        if isinstance(found, ApiError):
            raise found
        return found

    def close(self) -> None:
        """Ends the pool. Its processes are killed: the interpreter would wait at its end for one that is
        still starting, which takes minutes beside work that comes before it. The pool's thread is waited
        for: while it ends, the interpreter's end may write to a pipe that it closes."""
        self._is_closed = True
        for each in self._pool_processes.begun:
            each.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _get_pool(self) -> ProcessPoolExecutor | None:
        if self._pool is None and self._num_processes > 0:
            self._pool = self._begin_pool(self._num_processes)
        return self._pool

    def _begin_pool(self, num_processes: int) -> ProcessPoolExecutor | None:
        """None where processes cannot be told what they need."""
        try:
            translator = pickle.dumps(self.translator)
        except Exception as error:  # whatever a tokenizer of somebody else's raises
            logger.warning("large bodies are read by the server itself: %s", error)
            self._num_processes = 0
            return None
        _begin_tracker()
        pool = ProcessPoolExecutor(
            num_processes,
            self._pool_processes,
            _begin,
            (translator, self._logs, LIMIT.most_seconds),
        )
        pool.submit(os.getpid)  # starts its first process
        return pool


class _Processes(SpawnContext):
    """Begins processes and remembers them. A pool begins one whenever all others are busy, and waits for
    ever for one that is left when another was killed while it held the queue's lock. They are spawned: a
    copy of this process would copy its threads' locks."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[BaseProcess] = []

    def Process(self, **options: Any) -> BaseProcess:  # type: ignore[override] # noqa: N802
        """Returns a process that has not started yet."""
        self.begun = [each for each in self.begun if each.is_alive()]
        self.begun.append(process := SpawnProcess(**options))
        return process


_TRACKER_FILTER = "ignore:resource_tracker:UserWarning"


def _begin_tracker() -> None:
    """Begin the process that removes a pool's semaphores when this one was killed, without a word: it
    would warn of a leak that it is about to mend, on standard error and in no form of the log."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},{_TRACKER_FILTER}" if before else _TRACKER_FILTER
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


# --- in the pool ---

_translator: Translator | None = None


def _begin(translator: bytes, logs: LogOptions, most_seconds: float) -> None:
    global _translator
    logs.begin()
    LIMIT.may_die, LIMIT.most_seconds = True, most_seconds
    # Tokens of running requests come first.
    os.nice(_NICENESS)
    # A terminal's Ctrl-C or end reaches the whole group; the server says when to end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _translator = pickle.loads(translator)
    settle_memory()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_BYTES, used + _MOST_BYTES))


def _end_with_parent() -> None:
    """A pool whose server was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@panics_as_errors()
def _read_here(
    body: Body | LargeBody,
    work: Work[Result],
    resolver: SpeculativeResolver,
    adapters: tuple[str, ...],
) -> Result | ApiError:
    assert _translator is not None
    # With each body: the pool began with others if they were changed since.
    _translator.resolver, _translator.adapters = resolver, adapters
    try:
        return _read(_translator, body, work)
    except ApiError as error:
        return error
