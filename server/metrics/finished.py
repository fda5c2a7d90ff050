"""A log of finished requests for ``slipstream warm`` and ``replay``: a line for each choice, with the
token ids of prompt and completion and the request's own salt.

It holds what people wrote: only its owner may read it. Tenants have files of their own beside it, whose
salts mean something under the tenant's key alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from server.metrics.record import RECORD_KEY, RequestRecord

logger = logging.getLogger(__name__)
MOST_BYTES = 256 << 20
MOST_WAITING = 1024
"""Lines that may wait for the disk; more are left out."""


class FinishedMiddleware:
    """Adds each request's choices that came to an end of their own to the file at ``path``."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, Path(path)
        self._writer = ThreadPoolExecutor(1)
        self._num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope.setdefault(RECORD_KEY, RequestRecord())
        await self._app(scope, receive, send)
        for path, line in _lines(record, self._path):
            if self._num_waiting < MOST_WAITING:
                self._num_waiting += 1
                self._writer.submit(add_line, path, line).add_done_callback(self._done)

    def _done(self, written: Future[None]) -> None:
        self._num_waiting -= 1
        if (error := written.exception()) is not None:
            logger.error("a finished request is not written down: %s", error)


def _lines(record: RequestRecord, path: Path) -> Iterator[tuple[Path, bytes]]:
    """Yields what is written where; of adapters nothing, since the readers know none."""
    plan = record.plan
    for choice in record.choices:
        request, written = choice.plan.request, choice.token_ids[: choice.num_tokens]
        if plan is not None and choice.finish_reason and written and plan.adapter is None:
            line: dict[str, Any] = {"prompt": request.prompt_token_ids, "completion": written}
            line |= {"cache_salt": plan.cache_salt} if plan.cache_salt else {}
            own = f".{request.tenant.name}" if request.tenant.name else ""
            yield path.with_stem(path.stem + own), json.dumps(line).encode() + b"\n"


def add_line(path: Path, line: bytes) -> None:
    """Adds a line to a file that several processes may write. One that is long is renamed to end in
    ``.1``, in the place of the last such. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(line)
        is_long = file.tell() > MOST_BYTES and path.exists()
        if is_long and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            path.replace(f"{path}.1")
