"""The light client reads replies alike, however they are cut on their way."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.raw_client import Pieces, ReplyError, events, status

EVENTS = [{"token_ids": [5]}, {"token_ids": [6, 7, 8]}, {"token_ids": []}]
TEXTS = [
    b'data: {"token_ids": [5]}\n\n',
    b": ping\n\n",
    b'data: {"token_ids": [6, 7, 8]}\r\n\r\n',
    b'data: {"token_ids": []}\n\n',
    b"data: [DONE]\n\n",
]
PLAIN = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(TEXTS)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(text), text) for text in TEXTS)
    + b"0\r\n\r\n"
)
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\n\r\nthe queue is full"


def cut(reply: bytes, *places: int) -> Pieces:
    """Pieces that end at these places, at times 0, 1 and on; the last is empty, as at a socket's end."""
    pieces = pairwise([0, *places, len(reply), len(reply)])
    return [(float(at), reply[start:end]) for at, (start, end) in enumerate(pieces)]


@pytest.mark.parametrize("reply", [PLAIN, CHUNKED])
def test_an_event_has_come_when_its_line_is_complete(reply: bytes) -> None:
    first, second = reply.index(b"[5]}\n") + 5, reply.index(b"8]}\r\n") + 4
    assert events(cut(reply, first, second)) == [*zip((0.0, 2.0, 2.0), EVENTS, strict=True)]
    for place in range(1, len(reply)):
        assert [event for _, event in events(cut(reply, place))] == EVENTS


def test_a_line_may_lie_in_two_chunks() -> None:
    line = TEXTS[0]
    halves = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (line[:9], line[9:]))
    head, _, rest = CHUNKED.partition(b"\r\n\r\n")
    first = b"%x\r\n%b\r\n" % (len(line), line)
    reply = head + b"\r\n\r\n" + rest.replace(first, halves, 1)
    assert [event for _, event in events([(0.0, reply)])] == EVENTS


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        *((each[: each.index(b"data: [DONE]")], "broke off") for each in (PLAIN, CHUNKED)),
        (REFUSED, "the queue is full"),
        (b"", "hung up"),
        (PLAIN.replace(b'{"token_ids": []}', b'{"error": "it stopped"}'), "it stopped"),
    ],
)
def test_what_is_no_whole_reply_is_an_error_in_its_own_words(reply: bytes, told: str) -> None:
    with pytest.raises(ReplyError, match=told):
        events([(0.0, reply)])


def test_a_status_is_read_of_any_reply() -> None:
    assert [status([(0.0, each)]) for each in (PLAIN, REFUSED)] == [200, 429]
