"""Messages that must not make their sender wait."""

from __future__ import annotations

from multiprocessing import Pipe

from engine.process.link import Outbox


def test_a_reader_that_does_not_read_delays_nobody_and_misses_nothing() -> None:
    reader, writer = Pipe()
    outbox = Outbox(writer)
    sent = [(number, b"x" * (number * 7919 % 60_000)) for number in range(300)]
    for message in sent:
        outbox.put(message)
    assert [reader.recv() for _ in sent] == sent
    outbox.put("after")
    assert reader.recv() == "after"


def test_what_is_sent_to_nobody_is_dropped() -> None:
    reader, writer = Pipe()
    outbox = Outbox(writer)
    reader.close()
    for _ in range(3):
        outbox.put(b"x" * 100_000)
        outbox.put("small")
