"""Ranks that the first one launches: where they are told to be, how they end, that all end with it."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.logs import LogOptions
from engine.process.follower import Followers
from engine.process.launch import EngineProcess, Launch
from engine.request.errors import EngineError
from worlds.engine_apart import assert_ends_with_its_parent, connected, has_gone, num_handles
from worlds.gated_engine import (
    HANG,
    LONG,
    asking,
    collect,
    outcomes,
    text_of,
    tokens_of,
    until,
    within,
)

ENGINE = "worlds.engine_apart:build"


@contextmanager
def launched(what: str, size: int = 2) -> Iterator[tuple[Followers, queue.SimpleQueue[str]]]:
    """Ranks that do ``worlds.lone_rank``'s ``what``, and the reasons with which any were lost."""
    config = EngineConfig(model="wheels", tensor_parallel_size=size)
    followers = Followers(Launch(ENGINE, config, LogOptions(), f"worlds.lone_rank:{what}"))
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    followers.watch(lost.put)
    try:
        yield followers, lost
    finally:
        followers.stop()


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_each_is_told_its_place_and_says_why_it_cannot_follow() -> None:
    with launched("refuse", size=3) as (followers, lost):
        reasons = sorted(lost.get(timeout=HANG) for _ in followers.pids)
    assert reasons == [
        f"rank {n}: RANK={n}, WORLD_SIZE=3, LOCAL_RANK={n}, LOCAL_WORLD_SIZE=3: no wheels"
        for n in (1, 2)
    ]
    assert followers.environment["RANK"] == "0"
    assert followers.environment["WORLD_SIZE"] == "3"


def test_one_that_is_killed_is_missed_and_those_that_are_stopped_are_not() -> None:
    before = num_handles()
    with launched("wait", size=3) as (followers, lost):
        first, second = followers.pids
        os.kill(first, signal.SIGKILL)
        assert lost.get(timeout=HANG) == "rank 1: its process ended: signal SIGKILL"
        assert not has_gone(second)
    assert has_gone(second)
    assert lost.empty()
    del followers
    assert num_handles() <= before


@within(4 * HANG)
async def test_an_engine_ends_with_any_of_its_ranks_and_comes_back_with_all() -> None:
    config = EngineConfig(max_num_seqs=4, tensor_parallel_size=2)
    process = EngineProcess(config, build=ENGINE, follow="worlds.lone_rank:wait")
    try:
        async with connected(process) as engine:
            process.watch(lambda info: engine.replace(info, process.connect()))
            (reading,) = outcomes(engine, "r", LONG, "none")
            await until(lambda: engine.num_open == 1)
            assert process.pid is not None
            (follower,) = children_of(process.pid)
            for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: not its business
                os.kill(follower, number)
            assert not has_gone(follower)
            os.kill(follower, signal.SIGKILL)
            assert await reading == "EngineDeadError"
            await until(lambda: engine.is_alive)
            assert tokens_of(await collect(engine.generate(asking("s")))) == text_of(asking("s"))
            (follower,) = children_of(process.pid)
    finally:
        process.stop()
    assert has_gone(follower)


def test_what_a_rank_refuses_the_engine_refuses() -> None:
    process = EngineProcess(
        EngineConfig(model="wheels", tensor_parallel_size=2),
        build="worlds.lone_rank:wait",
        follow="worlds.lone_rank:refuse",
    )
    try:
        with pytest.raises(EngineError, match="rank 1: RANK=1, WORLD_SIZE=2, .*: no wheels"):
            process.start()
    finally:
        process.stop()


def test_no_rank_outlives_the_first_however_that_ends() -> None:
    code = (
        "from engine.config import EngineConfig\n"
        "from engine.logs import LogOptions\n"
        "from engine.process.follower import Followers\n"
        "from engine.process.launch import Launch\n"
        "config = EngineConfig(tensor_parallel_size=2)\n"
        "followers = Followers(Launch('', config, LogOptions(), 'worlds.lone_rank:wait'))\n"
        "print(followers.pids[0], flush=True); time.sleep(600)\n"
    )
    assert_ends_with_its_parent(code)
