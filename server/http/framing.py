"""Where the parts of requests end on a connection, and how much of them is no body.

The parser of HTTP calls back only when a whole header has come, and keeps all of it until then. So what
comes is cut into pieces before it gets there: a line of a head, of a chunk's size or of trailers, or
bytes of a body. A piece that is not of a body is counted before it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from server.errors import ApiError, headers_too_large, url_too_long

# What a chunk may have beside its data: without extensions none takes more.
_FREE_BYTES_PER_CHUNK = 16
_CHUNK_END = len(b"\r\n")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]*")


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """The limits of a request beside its body: ``num_bytes`` of URL, headers, trailers and extensions of
    chunks together, and ``num_headers``, trailers among them."""

    num_bytes: int = 64 << 10
    num_headers: int = 100


class Framing:
    """The requests of one connection, one after the other. It believes the parser's callbacks, from
    ``begin_body`` to ``end_request``, and finds the ends of pieces by itself: between two calls of
    ``end_of_piece`` the parser gets exactly the piece found.

    ``has_head``: whether the head of the request under way is whole. ``is_between``: whether there is no
    request under way, not even its first byte."""

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        self.end_request()

    def end_request(self) -> None:
        """The request is whole."""
        self.is_between = True
        self.has_head = False
        self._num_bytes = self._num_lines = 0
        self._num_data = 0
        # A chunk's size as it comes, None outside of chunks' lines.
        self._size: bytes | None = None

    def begin_body(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head is whole. ``headers``: as the parser let them pass."""
        self.has_head = True
        self._num_lines -= 1
        for name, value in headers:
            if name == b"transfer-encoding":
                self._size = b""
            elif name == b"content-length":
                self._num_data = int(value)

    def begin_chunk(self) -> None:
        """A chunk's size has come; after the last one come trailers."""
        line = self._size or b""
        digits = _CHUNK_SIZE.match(line)
        assert digits is not None
        size = int(digits[0] or b"0", 16)
        self._num_lines -= 1
        self._num_bytes -= min(len(line), _FREE_BYTES_PER_CHUNK)
        self._num_data = size + _CHUNK_END if size else 0
        self._size = b"" if size else None

    def end_of_piece(self, data: bytes, begin: int) -> int:
        """Returns where the piece of ``data`` ends that begins there, and counts it."""
        self.is_between = False
        if self._num_data:
            end = min(len(data), begin + self._num_data)
            self._num_data -= end - begin
            return end
        limit = begin + self._limits.num_bytes - self._num_bytes
        end = data.find(b"\n", begin, limit) + 1
        self._num_lines += end > 0
        end = end or min(len(data), limit)
        self._num_bytes += end - begin
        if self._size is not None:
            self._size += data[begin:end]
        return end

    def excess(self, url: bytes) -> ApiError | None:
        """Returns why no more of the request is read, if its head or trailers go on beyond the limits."""
        if self._num_data or self.is_between:
            return None
        if self._num_bytes >= self._limits.num_bytes:
            is_url = 2 * len(url) > self._limits.num_bytes
            return (url_too_long if is_url else headers_too_large)(self._limits.num_bytes)
        # The first line is the request's own.
        if self._num_lines > 1 + self._limits.num_headers:
            return headers_too_large(self._limits.num_bytes, self._limits.num_headers)
        return None
