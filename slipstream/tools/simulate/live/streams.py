"""A client that costs little beside a server on the same machine: what comes is kept with the time of
every read, and taken apart when the stream has ended."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.client.errors import ClientError, RefusedError
from slipstream.client.stream import DONE, Piece, parse_event

COMPLETIONS = "/v1/completions"
_READ = 1 << 16
_SILENCE = 120.0
"""Seconds without a byte after which a server counts as hung."""
_PREFIX = b"data: "
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Streamed:
    """A reply: when it was asked for, when each of its chunks with text came, by ``perf_counter``, and
    the account at its end. ``steps``: of how many steps each chunk tells, where ``return_drafted`` asks
    for that."""

    start: float
    times: tuple[float, ...]
    steps: tuple[int, ...]
    usage: Mapping[str, Any]

    @property
    def first(self) -> float:
        """Seconds until the first chunk."""
        return self.times[0] - self.start

    @property
    def whole(self) -> float:
        """Seconds until the last one."""
        return self.times[-1] - self.start

    @property
    def num_steps(self) -> int:
        steps: int = self.usage["speculative"]["num_steps"]
        return steps

    @property
    def num_draft_tokens(self) -> int:
        drafts: int = self.usage["speculative"]["num_draft_tokens"]
        return drafts


@dataclass(frozen=True, slots=True)
class Address:
    port: int
    host: str = "127.0.0.1"

    async def post(self, body: Mapping[str, Any], path: str = COMPLETIONS) -> bytes:
        """The content of a reply that is not streamed. Raises ClientError."""
        _, _, content = await self._exchange(_request(self, body, path))
        return content.partition(b"\r\n\r\n")[2]

    async def stream(self, body: Mapping[str, Any]) -> Streamed:
        """A completion. Raises ClientError for whatever is no stream to its end with an account."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start, reads, content = await self._exchange(_request(self, asked))
        times, steps, usage, at, done = [], [], None, 0, False
        for line in content.split(b"\n"):
            at += len(line) + 1
            if not line.startswith(_PREFIX):
                continue
            data = line[len(_PREFIX) :].strip().decode()
            done = done or data == DONE
            piece = Piece() if data == DONE else parse_event(data)
            usage = piece.usage or usage
            if piece.text:
                times.append(_time_of(reads, at))
                steps.append(piece.num_steps)
        if not done or usage is None or not times:
            raise ClientError(f"no whole stream came: {content[:300]!r}")
        return Streamed(start, tuple(times), tuple(steps), usage)

    async def _exchange(self, request: bytes) -> tuple[float, list[tuple[int, float]], bytes]:
        """When it was sent, how many bytes had come by when, and these."""
        start = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(request)
                parts, reads, total = [], [], 0
                while part := await asyncio.wait_for(reader.read(_READ), _SILENCE):
                    total += len(part)
                    reads.append((total, time.perf_counter()))
                    parts.append(part)
            finally:
                writer.close()
        except (OSError, TimeoutError) as error:
            raise ClientError(f"port {self.port}: {error or 'nothing came in time'}") from error
        content = b"".join(parts)
        status = _STATUS.match(content)
        if status is None or status[1] != b"200":
            told = f"port {self.port} answers {content[:500].decode(errors='replace')}"
            raise ClientError(told) if status is None else RefusedError(told, int(status[1]))
        return start, reads, content


def _request(address: Address, body: Mapping[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        f"Connection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _time_of(reads: Sequence[tuple[int, float]], position: int) -> float:
    """When the byte before ``position`` had come."""
    return next(when for total, when in reads if total >= min(position, reads[-1][0]))
