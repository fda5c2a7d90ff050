"""Two replicas under Ray Serve itself, where Ray is installed (the extra ``ray``)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
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
SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "num_threads": 1, "log_level": "warning"}


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
    requests = mixed_requests(40)
    expected = asyncio.run(ask_all(one.url, requests, 8))
    found = asyncio.run(ask_all(fleet.url, requests, 8))
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
    one: Server, fleet: RayFleet, what: str
) -> None:
    expected = asyncio.run(ask_all(one.url, long_requests(12), 12))
    until(fleet.is_whole)
    pids = fleet.replica_pids() if what == "replica" else fleet.engine_pids()
    assert len(pids) == 2
    wholes, streams = asyncio.run(under_load(fleet, pids[0]))
    assert [each.error for each in wholes] == [None] * len(wholes)
    assert [each.texts for each in wholes] == [each.texts for each in expected]
    for stream, whole in zip(streams, expected, strict=True):
        written = "".join(stream.texts)
        if stream.error is None:
            assert written == whole.texts[0]
        else:
            assert stream.error in ("replica_lost", "engine_dead")
            assert written
            assert whole.texts[0].startswith(written)
    assert any(each.error is None for each in streams)
    assert any(each.error for each in streams)
    # Serve puts another in its place.
    until(fleet.is_whole)
