"""A client that costs next to nothing, for benches whose client shares a machine with the server.

    python -m bench.raw_client URL [PATH] < BODIES

Raw sockets; replies are kept as they come, with the time of every read, and parsed when all have ended.
In a process of the lowest priority it takes what server and engine leave. ``BODIES`` is a JSON list of
bodies for ``/v1/completions`` or PATH, sent at once, that ask for streams with token ids; what comes back
is a list per body with the time of each of its tokens, by ``time.perf_counter``, which Linux keeps for
all processes. Imports the standard library only, as peers' workers do.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any
from urllib.parse import urlsplit

_READ = 1 << 16
_SECONDS = 600.0
_PREFIX = b"data: "
_DONE = b"[DONE]"
COMPLETIONS = "/v1/completions"

Pieces = list[tuple[float, bytes]]
"""Pieces as they were read, and when."""


class ReplyError(Exception):
    """A reply that is missing, failed or broke off."""


def token_times(
    url: str, bodies: list[dict[str, Any]], path: str = COMPLETIONS
) -> list[list[float]]:
    """When each token of each body's stream came, told by a client in a process of its own."""
    command = ["nice", "-n", "19", sys.executable, "-m", "bench.raw_client", url, path]
    said = subprocess.run(
        command, input=json.dumps(bodies).encode(), stdout=subprocess.PIPE, check=True
    )
    found: list[list[float]] = json.loads(said.stdout)
    return found


def post(url: str, content: bytes) -> socket.socket:
    """A connection that has sent the body, and whose reply ends with it."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = socket.create_connection((place.hostname, place.port or 80), _SECONDS)
    connection.sendall(request(url, content))
    return connection


def request(url: str, content: bytes) -> bytes:
    """Returns a request with a body of JSON, after whose reply the connection ends."""
    place = urlsplit(url)
    head = (
        f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_all(connections: Sequence[socket.socket]) -> list[Pieces]:
    """Each reply to its end. Raises ReplyError where nothing comes for ten minutes."""
    opened = [partial(_itself, connection) for connection in connections]
    return [pieces for _, pieces in read_in_turn(opened, len(opened))]


def _itself(connection: socket.socket) -> socket.socket:
    return connection


def read_in_turn(
    senders: Sequence[Callable[[], socket.socket]], num_running: int
) -> list[tuple[float, Pieces]]:
    """Each reply to its end, and when it was asked for: ``num_running`` at a time, each that ends
    followed by the next. Raises ReplyError where nothing comes for ten minutes."""
    replies: list[tuple[float, Pieces]] = []
    waiting = iter(senders)
    with selectors.DefaultSelector() as ready:

        def send_next() -> None:
            for send in islice(waiting, 1):
                replies.append((time.perf_counter(), []))
                ready.register(send(), selectors.EVENT_READ, replies[-1][1])

        for _ in range(num_running):
            send_next()
        while ready.get_map():
            found = ready.select(_SECONDS)
            if not found:
                raise ReplyError("nothing came in time")
            for key, _ in found:
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(_READ)
                key.data.append((time.perf_counter(), data))
                if not data:
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
                    send_next()
    return replies


def status(pieces: Pieces) -> int:
    """Raises ReplyError where there is no reply."""
    line = b"".join(data for _, data in pieces).partition(b"\r\n")[0].split(b" ")
    if len(line) < 2 or not line[1].isdigit():
        raise ReplyError("the server hung up without a reply")
    return int(line[1])


def events(pieces: Pieces) -> list[tuple[float, Any]]:
    """The JSON of every server-sent event, and when it was complete. Raises ReplyError."""
    reply = b"".join(data for _, data in pieces)
    head, _, body = reply.partition(b"\r\n\r\n")
    if (code := status(pieces)) != 200:
        raise ReplyError(f"HTTP {code}: {body[:500].decode(errors='replace')}")
    ends = list(accumulate(len(data) for _, data in pieces))
    found = []
    done = False
    for line, end in _lines(reply, len(head) + 4, b"chunked" in head.lower()):
        if line.startswith(_PREFIX + _DONE):
            done = True
        elif line.startswith(_PREFIX):
            event = json.loads(line[len(_PREFIX) :])
            if "error" in event:
                raise ReplyError(f"the server says: {event['error']}")
            done = done or event.get("stop") is True  # as llama.cpp ends its own streams
            found.append((pieces[bisect_left(ends, end)][0], event))
    if not done:
        raise ReplyError(f"the stream broke off: {reply[-200:].decode(errors='replace')}")
    return found


def _lines(reply: bytes, start: int, is_chunked: bool) -> Iterator[tuple[bytes, int]]:
    """Lines of a body that begins at ``start``, and the place in ``reply`` where each ends."""
    left = b""
    for begin, end in _chunks(reply, start) if is_chunked else [(start, len(reply))]:
        *lines, rest = (left + reply[begin:end]).split(b"\n")
        place = begin - len(left)
        for line in lines:
            place += len(line) + 1
            yield line, place
        left = rest


def _chunks(reply: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Where the body's chunks begin and end; what broke off is none."""
    while (eol := reply.find(b"\r\n", start)) >= 0:
        begin = eol + 2
        end = begin + int(reply[start:eol], 16)
        if end == begin or end > len(reply):
            return
        yield begin, end
        start = end + 2


def main() -> None:
    url, path = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else COMPLETIONS
    bodies = json.load(sys.stdin)
    connections = [post(f"{url}{path}", json.dumps(body).encode()) for body in bodies]
    times = []
    for pieces in read_all(connections):
        choices = ((came, each) for came, event in events(pieces) for each in event["choices"])
        times.append([came for came, choice in choices for _ in choice["token_ids"]])
    print(json.dumps(times))


if __name__ == "__main__":
    main()
