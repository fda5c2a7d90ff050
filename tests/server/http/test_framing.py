"""Where requests end, by the parser's word and by what the pieces say."""

from __future__ import annotations

import random

import httptools
import pytest

from server.http.framing import Framing, HeadLimits

LIMITS = HeadLimits(1024, 10)
GET = b"GET /a?b HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n\n\r\n0\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
REQUESTS = {
    "get": GET,
    "post": POST,
    "chunks": CHUNKED + b"5\r\n0\r\n\r\n\r\n00A\r\n0123456789\r\n0\r\n\r\n",
    "extensions": CHUNKED + b'3;a=b;c="d"\r\n\n\n\n\r\n0;last\r\n\r\n',
    "trailers": CHUNKED + b"1\r\nx\r\n000\r\na: b\r\nc: d\r\n\r\n",
    "upgrade": b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "blank line before": b"\r\n" + GET,
}


class Connection:
    """Requests as a protocol hears of them: ``ends`` are the bytes fed by each one's end."""

    def __init__(self, limits: HeadLimits = LIMITS) -> None:
        self.framing = Framing(limits)
        self.parser = httptools.HttpRequestParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.num_headers = self.num_fed = 0
        self.url = b""
        self.bodies: list[bytes] = []
        self.ends: list[int] = []

    def feed(self, data: bytes) -> int | None:
        """Returns the status of a refusal."""
        begin = 0
        while begin < len(data):
            end = self.framing.end_of_piece(data, begin)
            assert end > begin
            self.num_fed += end - begin
            num_taken = end - begin
            try:
                self.parser.feed_data(data[begin:end])
            except httptools.HttpParserUpgrade as upgrade:
                num_taken = upgrade.args[0]
            assert num_taken == end - begin  # nothing of what follows is lost
            if (error := self.framing.excess(self.url)) is not None:
                return error.status
            begin = end
        return None

    def on_message_begin(self) -> None:
        self.url, self.headers = b"", []
        self.bodies.append(b"")

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.num_headers += 1
        if not self.framing.has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.framing.begin_body(self.headers)

    def on_chunk_header(self) -> None:
        self.framing.begin_chunk()

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.framing.end_request()
        self.ends.append(self.num_fed)


def in_parts(data: bytes, draws: random.Random) -> list[bytes]:
    cuts = sorted(draws.sample(range(1, len(data)), draws.randrange(len(data) - 1)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_a_piece_ends_where_a_request_ends_however_it_comes(seed: int) -> None:
    draws = random.Random(seed)
    chosen = draws.choices(list(REQUESTS.values()), k=6)
    whole = b"".join(chosen)
    connection = Connection()
    for part in in_parts(whole, draws):
        assert connection.feed(part) is None
    ends = [sum(map(len, chosen[: count + 1])) for count in range(len(chosen))]
    assert connection.ends == ends
    assert connection.framing.is_between


def head_of(num_bytes: int, end: bytes = b"\r\n\r\n") -> bytes:
    begin = b"GET / HTTP/1.1\r\nhost: x\r\na: "
    return begin + b"x" * (num_bytes - len(begin) - len(end)) + end


@pytest.mark.parametrize("before", [b"", GET, POST, REQUESTS["trailers"]])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_head_of_the_limit_passes_and_one_byte_more_does_not(before: bytes, size: int) -> None:
    for num_bytes, status in ((1024, None), (1025, 431)):
        connection = Connection()
        data = before + head_of(num_bytes)
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert next(filter(None, map(connection.feed, parts)), None) == status
        if status is not None:
            assert len(connection.ends) == bool(before)


ENDLESS = {
    "header": (b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"x", 431),
    "name": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x", 431),
    "url": (b"GET /", b"x", 414),
    "blank lines": (b"", b"\r\n", 431),
    "trailer": (CHUNKED + b"3\r\nabc\r\n0\r\na: ", b"x", 431),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\n", b"a: b\r\n", 431),
    "extension": (CHUNKED + b"3;", b"x", 431),
    "extension of the last": (CHUNKED + b"0;", b"x", 431),
    "extensions": (CHUNKED, b"1;" + b"y" * 99 + b"\r\nz\r\n", 431),
    "zeros of a size": (CHUNKED, b"0", 431),
    "headers": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n", 431),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_never_ends_is_refused_at_the_limit(name: str, size: int) -> None:
    begin, more, status = ENDLESS[name]
    connection = Connection()
    data = begin + more * 3000
    parts = (data[at : at + size] for at in range(0, len(data), size))
    assert next(filter(None, map(connection.feed, parts)), None) == status
    body = sum(map(len, connection.bodies))
    # Each chunk has some bytes free.
    assert connection.num_fed <= LIMITS.num_bytes + 24 * body
    assert connection.ends == []


@pytest.mark.parametrize("in_trailers", [0, 3, 8])
def test_headers_and_trailers_are_counted_together(in_trailers: int) -> None:
    """``Host`` and ``Transfer-Encoding`` are two of them."""
    for num_more, status in ((0, None), (1, 431)):
        head = CHUNKED[:-2] + b"a: b\r\n" * (8 - in_trailers) + b"\r\n"
        trailers = b"c: d\r\n" * (in_trailers + num_more)
        connection = Connection()
        assert connection.feed(head + b"1\r\nx\r\n" * 20 + b"0\r\n" + trailers + b"\r\n") == status
        assert connection.num_headers <= 10 + num_more
