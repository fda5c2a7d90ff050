"""Events over real sockets: numbered, replayed, dropped where nobody keeps up, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.kv_events import publisher as module
from engine.kv_events.begin import begin_kv_events
from engine.kv_events.publisher import Publisher
from engine.kv_events.wire import Batch, BlockRemoved, BlockStored, decode, encode, sequence
from engine.request.params import GenerationRequest, SamplingParams
from worlds.kv_index import KvIndex, cached_hashes
from worlds.tiny_models import tiny_model

TOPIC = "kv@10.0.0.7:8000@tiny"
HANG = 300_000
"""Milliseconds after which a test that waits is taken to hang."""
MAX_ROUNDS = 2000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def connected(context: zmq.Context[Any], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.rcvtimeo = HANG
    if kind == zmq.SUB:
        socket.subscribe("kv@")
    socket.connect(endpoint)
    return socket


def replayed(context: zmq.Context[Any], endpoint: str, first: int = 0) -> list[list[bytes]]:
    """As consumers ask: an empty frame and a number; then messages up to one without a payload."""
    with connected(context, zmq.DEALER, endpoint) as asking:
        asking.send_multipart([b"", sequence(first)])
        found = []
        while True:
            empty, *frames = asking.recv_multipart()
            assert empty == b""
            if frames[2] == b"":
                assert frames[:2] == [b"", b"\xff" * 8]
                return found
            found.append(frames)


def kept(context: zmq.Context[Any], endpoint: str, count: int) -> list[list[bytes]]:
    """A replay, once so many are there. Each one asked for lets the publisher do what it has to."""
    for _ in range(MAX_ROUNDS):
        if len(found := replayed(context, endpoint)) >= count:
            return found
    raise AssertionError(f"{count} batches were not kept: {found}")


def heard(subscriber: zmq.Socket[bytes], say: Callable[[int], None]) -> int:
    """Until the subscription has arrived what is sent is nobody's: ``say`` things, by number, until one
    is heard. How many it took."""
    for number in range(MAX_ROUNDS):
        if subscriber.poll(10):
            return number
        say(number)
    raise AssertionError("nothing is heard")


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([number], "GPU")


def test_batches_are_arrays_with_tags() -> None:
    stored = BlockStored([2**64 - 1, 2], 7, [1, 2], 1, medium="GPU", extra_keys=[["s"], None])
    events = [stored, BlockStored([3], None, [4], 1, medium="GPU"), removed(9)]
    written = encode(Batch(12.5, events))
    assert msgspec.msgpack.decode(written) == [
        12.5,
        [
            ["BlockStored", [2**64 - 1, 2], 7, [1, 2], 1, None, "GPU", None, [["s"], None]],
            ["BlockStored", [3], None, [4], 1, None, "GPU", None, None],
            ["BlockRemoved", [9], "GPU"],
        ],
        0,
    ]
    assert decode(written) == Batch(12.5, events)


def test_a_subscriber_gets_them_in_order_and_asks_for_what_it_missed(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"
    publisher = Publisher(live, again, TOPIC)
    publisher.start()
    with connected(context, zmq.SUB, live) as subscriber:
        number = heard(subscriber, lambda number: publisher.send([removed(number)]))
        publisher.send([removed(number)])
        got = [subscriber.recv_multipart()]
        while decode(got[-1][2]).events != [removed(number)]:
            got.append(subscriber.recv_multipart())
    everything = replayed(context, again)
    assert everything[-len(got) :] == got
    assert [int.from_bytes(each[1], "big") for each in everything] == list(range(number + 1))
    assert {each[0] for each in everything} == {TOPIC.encode()}
    assert replayed(context, again, first=number) == everything[-1:]
    assert replayed(context, again, first=number + 1) == []
    publisher.stop()


def test_where_too_many_wait_batches_are_dropped_and_their_numbers_are_missing(
    tmp_path: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    again = f"ipc://{tmp_path}/again"
    publisher = Publisher(f"ipc://{tmp_path}/live", again, TOPIC)
    # Nobody sends yet, and nobody who hands over waits for that.
    for number in range(5):
        publisher.send([removed(number), removed(number)])
    assert (publisher.num_sent, publisher.num_dropped) == (6, 4)
    publisher.start()
    with connected(context, zmq.DEALER, again) as asking:
        asking.send_multipart([b"neither"])
    kept(context, again, 3)
    publisher.send([removed(5)])
    found = kept(context, again, 4)
    assert [int.from_bytes(each[1], "big") for each in found] == [0, 1, 2, 5]
    publisher.stop()


def test_where_the_endpoint_names_a_host_it_is_connected_to(context: zmq.Context[Any]) -> None:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.rcvtimeo = HANG
        subscriber.subscribe("kv@")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        publisher = Publisher(f"tcp://127.0.0.1:{port}", None, TOPIC)
        publisher.start()
        heard(subscriber, lambda _: publisher.send([removed(1)]))
        assert decode(subscriber.recv_multipart()[2]).events == [removed(1)]
        publisher.stop()


def test_an_address_in_use_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with zmq.Context() as taken, taken.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://*")
        with pytest.raises(ValueError, match=rf"^kv_events_endpoint: tcp://\*:{port}: Address"):
            Publisher(f"tcp://*:{port}", None, TOPIC)
        replay = f"tcp://*:{port}"
        with pytest.raises(ValueError, match="^kv_events_replay_endpoint: tcp:"):
            Publisher(f"ipc://{tmp_path}/live", replay, TOPIC)


def test_without_the_extra_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    config = EngineConfig(kv_events_endpoint="tcp://*:5557", kv_events_topic=TOPIC)
    with pytest.raises(ValueError, match=r"kv_events_endpoint: .*\.\[kv-events\]"):
        begin_kv_events(config)
    assert begin_kv_events(EngineConfig()) is None


@pytest.mark.slow
def test_an_engines_events_are_its_cache(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """A real engine, written to by plain and salted requests; a subscriber rebuilds what it holds."""
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"
    config = EngineConfig(
        block_size=4,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        determinism="fast",
        kv_events_endpoint=live,
        kv_events_replay_endpoint=again,
        kv_events_topic=TOPIC,
    )
    engine = build_engine_for(tiny_model("llama"), None, config)

    async def write(name: str, prompt: list[int], salt: str = "") -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        asked = GenerationRequest(name, tuple(prompt), sampling, cache_salt=salt)
        async for _ in engine.generate(asked):
            pass

    async def serve() -> None:
        await engine.start()
        for number in range(6):
            await write(f"r{number}", [number] * 4 + [9] * 17)
        before = set(cached_hashes(engine.core.pool))
        await write("tenant's", [30] * 40, salt="tenant")
        assert cached_hashes(engine.core.pool) - before
        # A live subscriber hears of what comes, and asks for the rest.
        index = KvIndex()
        with connected(context, zmq.SUB, live) as subscriber:
            for number in range(MAX_ROUNDS):
                if subscriber.poll(10):
                    break
                await write(f"live{number}", [number % 20] * 9)
            first = subscriber.recv_multipart()
            for frames in replayed(context, again):
                index.read(frames)
        assert index.last_number is not None
        assert int.from_bytes(first[1], "big") <= index.last_number
        salted = cached_hashes(engine.core.pool) - index.tokens.keys()
        assert index.tokens.keys() <= cached_hashes(engine.core.pool)
        assert len(salted) == 11
        assert index.salts == {}
        assert (30,) * 4 not in index.tokens.values()
        await engine.stop(0)

    asyncio.run(serve())
    # Who listens no more gets nothing, and the address is free again.
    Publisher(live, again, TOPIC).stop()


def test_a_replay_is_whole_however_slowly_it_is_read(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    again = f"ipc://{tmp_path}/again"
    publisher = Publisher(f"ipc://{tmp_path}/live", again, TOPIC)
    # More than any buffer of the system takes.
    payload, count = b"x" * 20_000, module.MAX_KEPT
    publisher._kept.extend((number, payload) for number in range(count))
    publisher.start()
    asking = context.socket(zmq.DEALER)
    asking.rcvhwm = 1
    asking.rcvtimeo = 10_000
    asking.connect(again)
    asking.send_multipart([b"", sequence(0)])
    assert asking.poll(HANG)
    # By now all of it was sent, or dropped: this is answered after it.
    replayed(context, again, first=count)
    numbers = [int.from_bytes(asking.recv_multipart()[2], "big") for _ in range(count)]
    assert numbers == list(range(count))
    assert asking.recv_multipart()[3] == b""
    asking.close()
    publisher.stop()
