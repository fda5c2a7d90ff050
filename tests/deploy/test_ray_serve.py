"""Two replicas under Ray Serve itself, where Ray is installed (the extra ``ray``)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from bench.replicas import Answer, Asked, ask, ask_all, documents, mixed_requests
from worlds.ray_fleet import RayFleet, ray_fleet
from worlds.served_command import HANG, Server, serving, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed"),
]
# Engines share the cores with each other here.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 16,
    "num_threads": 1,
    "log_level": "warning",
    "admin_key": "secret",
}
ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "16", "--num-threads", "1")
    with serving(tmp_path_factory.mktemp("one"), *flags) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with ray_fleet(tmp_path_factory.mktemp("fleet"), SETTINGS) as found:
        yield found


def long_requests(count: int, **more: Any) -> list[Asked]:
    plain = {"speculative": {"draft_strategy": "none"}, "ignore_eos": True}
    body = {"max_tokens": 400, "temperature": 0.8, **plain, **more}
    texts = documents()[:count]
    return [
        Asked("/v1/completions", {"prompt": text, "seed": number, **body})
        for number, text in enumerate(texts)
    ]


def test_replicas_write_what_one_server_writes(one: Server, fleet: RayFleet) -> None:
    """All drafters, greedy and sampled; all requests at once at the replicas, two at a time at the
    one server."""
    requests = mixed_requests(64)
    expected = asyncio.run(ask_all(one.url, requests, 2))
    found = asyncio.run(ask_all(fleet.url, requests, len(requests)))
    assert [each.texts for each in found] == [each.texts for each in expected]
    assert {each.error for each in (*expected, *found)} == {None}
    # Both had a part in it.
    assert min(fleet.by_replica("slipstream_requests_total").values()) > 0


def test_a_client_who_leaves_ends_its_request(fleet: RayFleet) -> None:
    (asked,) = long_requests(1, max_tokens=1700, stream=True)
    body = {"model": "slipstream-bundled", **asked.body}
    with (
        httpx.Client(base_url=fleet.url, timeout=HANG) as client,
        client.stream("POST", asked.path, json=body) as reply,
    ):
        lines = reply.iter_lines()  # the answer is closed with what reads it
        next(lines)
        assert sum(fleet.by_replica("slipstream_requests_running").values()) == 1
    until(lambda: sum(fleet.by_replica("slipstream_requests_running").values()) == 0)
    assert sum(fleet.by_replica("slipstream_kv_blocks").values()) > 0


@pytest.fixture(scope="module")
def whole_texts(one: Server) -> list[str]:
    """The texts of the long requests, written by one server."""
    found = asyncio.run(ask_all(one.url, long_requests(12), 12))
    assert {each.error for each in found} == {None}
    return [each.texts[0] for each in found]


async def ask_while(
    fleet: RayFleet, requests: list[Asked], change: Callable[[], None]
) -> list[list[Answer]]:
    """Answers to each of the requests, which are asked again and again during the change."""
    is_changed = False

    async def again(client: httpx.AsyncClient, asked: Asked) -> list[Answer]:
        answers: list[Answer] = []
        while not answers or not is_changed:
            answers.append(await ask(client, asked))
        return answers

    async with httpx.AsyncClient(base_url=fleet.url, timeout=HANG) as client:
        asking = asyncio.gather(*(again(client, each) for each in requests))
        await asyncio.to_thread(until, lambda: num_open(fleet) >= len(requests))
        try:
            await asyncio.to_thread(change)
        finally:
            is_changed = True
        return await asking


def num_open(fleet: RayFleet) -> float:
    return sum(each.value for each in fleet.samples("slipstream_gateway_requests_open"))


def counted(fleet: RayFleet, name: str) -> float:
    return sum(each.value for each in fleet.samples(f"slipstream_gateway_{name}_total"))


def default_drafters(fleet: RayFleet) -> list[str]:
    found = fleet.samples("slipstream_speculative_defaults_info")
    return [each.labels["draft_strategy"] for each in found if each.value == 1]


def test_replicas_come_and_go_without_an_error(fleet: RayFleet, whole_texts: list[str]) -> None:
    """And the one that comes goes by what was changed before."""
    streams = long_requests(4, stream=True)

    def scale(num_replicas: int) -> None:
        fleet.deploy(num_replicas)
        until(lambda: fleet.serves(num_replicas))

    for num_replicas in (1, 2):
        answers = asyncio.run(ask_while(fleet, streams, lambda: scale(num_replicas)))  # noqa: B023
        for found, text in zip(answers, whole_texts, strict=False):
            assert [(each.error, "".join(each.texts)) for each in found] == [(None, text)] * len(
                found
            )
        if num_replicas == 1:
            change = {"defaults": {"draft_strategy": "suffix"}}
            reply = httpx.patch(
                f"{fleet.url}/admin/speculative", json=change, headers=ADMIN, timeout=HANG
            )
            assert reply.status_code == 200, reply.text
    assert default_drafters(fleet) == ["suffix", "suffix"]
    assert counted(fleet, "streams_lost") == 0


async def under_load(fleet: RayFleet, kill: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to whole replies and streams, while a process is killed once half of the streams have
    begun on their way."""
    wholes, streams = long_requests(12), long_requests(12, stream=True)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=HANG) as client:
        asking = [asyncio.ensure_future(ask(client, each)) for each in (*wholes, *streams)]
        while sum(fleet.by_replica("slipstream_requests_running").values()) < 16:
            await asyncio.sleep(0.05)
        os.kill(kill, signal.SIGKILL)
        answers = await asyncio.gather(*asking)
    return answers[: len(wholes)], answers[len(wholes) :]


@pytest.mark.parametrize("what", ["replica", "engine"])
def test_a_replica_killed_under_load_loses_nothing_that_can_be_redone(
    fleet: RayFleet, whole_texts: list[str], what: str
) -> None:
    until(fleet.serves)
    before = counted(fleet, "streams_lost"), counted(fleet, "requests_redone")
    pids = fleet.replica_pids() if what == "replica" else fleet.engine_pids()
    assert len(pids) == 2
    wholes, streams = asyncio.run(under_load(fleet, pids[0]))
    assert [each.error for each in wholes] == [None] * len(wholes)
    assert [each.texts for each in wholes] == [(text,) for text in whole_texts]
    for stream, text in zip(streams, whole_texts, strict=True):
        written = "".join(stream.texts)
        if stream.error is None:
            assert written == text
        else:
            assert stream.error in ("replica_lost", "engine_dead")
            assert written
            assert text.startswith(written)
    assert any(each.error is None for each in streams)
    assert any(each.error for each in streams)
    num_cut = sum(each.error is not None for each in streams)
    assert counted(fleet, "streams_lost") - before[0] == num_cut
    assert counted(fleet, "requests_redone") > before[1]
    # Serve puts another in its place.
    until(fleet.serves)


def test_two_ranks_under_serve_write_what_one_process_does(
    fleet: RayFleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The last test of the file: from here on the fleet is another."""
    requests = [
        Asked(
            "/v1/completions",
            {
                "prompt": text,
                "seed": number,
                "max_tokens": 32,
                "temperature": temperature,
                "stream": number % 2 == 0,
                "speculative": {"draft_strategy": drafter},
            },
        )
        for number, text in enumerate(documents()[:3])
        for temperature in (0, 0.8)
        for drafter in ("none", "ngram")
    ]
    flags = ("--dtype", "float32", "--num-threads", "1", "--drafters", "none,ngram")
    with serving(tmp_path_factory.mktemp("whole"), *flags) as whole:
        expected = asyncio.run(ask_all(whole.url, requests, 1))
    ranks = {"tensor_parallel_size": 2, "dtype": "float32", "drafters": ["none", "ngram"]}
    fleet.deploy(1, SETTINGS | ranks)

    def has_two_ranks() -> bool:
        reply = httpx.get(f"{fleet.url}/v1/models", timeout=HANG)
        cards = reply.json()["data"] if reply.is_success else [{}]
        return cards[0].get("tensor_parallel_size") == 2 and fleet.serves(1)

    until(has_two_ranks)
    found = asyncio.run(ask_all(fleet.url, requests, 4))
    assert [each.texts for each in found] == [each.texts for each in expected]
    assert {each.error for each in (*expected, *found)} == {None}
