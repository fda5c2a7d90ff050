"""Messages between processes: in order, never waited for, answered, and their peer's end noticed."""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from pickle import PicklingError
from types import FrameType
from typing import Any, cast

import pytest

from engine.process import link
from engine.process.link import Link, PeerGoneError
from engine.request.errors import RequestError
from worlds.gated_engine import HANG


def links() -> tuple[Link, Link]:
    ours, theirs = Pipe()
    return Link(ours), Link(theirs)


class Listening:
    """Hears what a link is told, and that it has lost its peer."""

    def __init__(self, link: Link, act: Callable[[Any], Any] = lambda _: None) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[None] = queue.SimpleQueue()

        def hear(message: Any) -> Any:
            self.heard.put(message)
            return act(message)

        link.listen_in_thread({"hear": hear}, lambda: self.lost.put(None))


def test_a_reader_that_does_not_read_delays_nobody_and_misses_nothing() -> None:
    reader, writer = links()
    sent = [(number, b"x" * (number * 7919 % 60_000)) for number in range(300)]
    for message in sent:
        writer.send(message)
    assert [reader.receive() for _ in sent] == sent
    writer.send("after")
    assert reader.receive() == "after"


def slowly(frame: FrameType, event: str, argument: Any) -> Any:
    """Traces a thread, so that each line of a link's code takes a millisecond."""
    del event, argument
    if frame.f_code.co_filename != link.__file__:
        return None
    time.sleep(1e-3)
    return slowly


def test_what_is_sent_while_a_link_s_own_thread_ends_comes_once() -> None:
    reader, writer = links()
    threading.settrace(slowly)
    try:
        for number in range(60):
            message = number, b"x" * 33_000  # more than is sent at once
            writer.send(message)
            assert reader.receive() == message
            time.sleep(number * 3e-4)
    finally:
        threading.settrace(cast(Any, None))


def test_what_is_sent_to_nobody_is_dropped() -> None:
    reader, writer = links()
    reader.close()
    for _ in range(3):
        writer.send(b"x" * 100_000)
        writer.send("small")
    writer.close()
    writer.send("closed")
    with pytest.raises(PeerGoneError):
        writer.receive()


def test_one_that_is_closed_waits_for_no_reader() -> None:
    _reader, writer = links()
    for _ in range(10):
        writer.send(b"x" * 1_000_000)
    writer.close()


def test_a_handle_goes_along_whatever_was_sent_before_it(tmp_path: Path) -> None:
    reader, writer = links()
    passed: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    acts = {"skip": lambda _: None, "take": lambda *given: passed.put(given)}
    reader.listen_in_thread(acts, lambda: None)
    for name in ("first", "second"):
        writer.call("skip", b"x" * 300_000)
        with (tmp_path / name).open("wb") as file:
            writer.call("take", name, handle=file.fileno())
    for name in ("first", "second"):
        found, handle = passed.get(timeout=HANG)
        assert found == name
        os.write(handle, name.encode())
        os.close(handle)
        assert (tmp_path / name).read_text() == name


def test_questions_are_answered_by_what_is_returned_raised_or_comes_later() -> None:
    asker, asked = links()
    later: Future[str] = Future()

    def act(question: str) -> Any:
        if question == "now":
            return 1
        if question == "later":
            return later
        raise RequestError("top_k", "refused") if question == "refused" else KeyError(question)

    Listening(asked, act)
    Listening(asker)
    waits = asker.ask("hear", "later")
    assert asker.ask("hear", "now").result(HANG) == 1
    with pytest.raises(RequestError, match="refused") as refused:
        asker.ask("hear", "refused").result(HANG)
    assert refused.value.param == "top_k"
    # What nobody has foreseen comes back, too, and says where it happened.
    with pytest.raises(KeyError, match="odd") as failed:
        asker.ask("hear", "odd").result(HANG)
    assert f"In process {os.getpid()}" in failed.value.__notes__[0]
    assert "raise RequestError" in failed.value.__notes__[0]
    later.set_result("at last")
    assert waits.result(HANG) == "at last"


@pytest.mark.parametrize("answer", [lambda: None, OSError(lambda: None)])
def test_an_answer_that_cannot_be_sent_is_an_error_all_the_same(answer: Any) -> None:
    asker, asked = links()

    def act(_: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    Listening(asked, act)
    Listening(asker)
    with pytest.raises((PicklingError, RuntimeError)):
        asker.ask("hear", "what").result(HANG)


def test_a_message_that_cannot_be_acted_on_keeps_none_from_being_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer, reader = links()

    def act(message: str) -> None:
        if message == "bad":
            raise ZeroDivisionError

    listening = Listening(reader, act)
    for message in ("bad", "good"):
        writer.call("hear", message)
        assert listening.heard.get(timeout=HANG) == message
    assert "failed to act" in caplog.text


def send_what_cannot_be_read(link: Link) -> None:
    link._connection.send_bytes(b"no pickle")


def send_half_a_message(link: Link) -> None:
    os.write(link._connection.fileno(), struct.pack("!i", 100) + b"half")
    link.close()


@pytest.mark.parametrize("end", [Link.close, send_what_cannot_be_read, send_half_a_message])
def test_a_peer_that_has_gone_or_is_broken_is_noticed_and_questions_end(
    end: Callable[[Link], None],
) -> None:
    ours, theirs = links()
    listening = Listening(ours)
    asked = ours.ask("hear", "what")
    end(theirs)
    listening.lost.get(timeout=HANG)
    with pytest.raises(PeerGoneError):
        asked.result(HANG)
    with pytest.raises(PeerGoneError):
        ours.ask("hear", "what now").result(HANG)
    # Nor does whoever broke it wait for an end that would not come.
    rest = iter(theirs.receive, None)
    with pytest.raises(PeerGoneError):
        list(rest)
