"""An engine in a process of its own: streams, refusals, death, return and end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.process import launch, streams
from engine.process.client import RemoteEngine
from engine.process.launch import EngineProcess
from engine.process.pulse import Pulse, shared_handle
from engine.request.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    TenantLimitError,
)
from engine.request.info import EngineInfo
from engine.request.params import SpeculativeParams, Tenant
from engine.request.stats import StepStats
from worlds.engine_apart import (
    CHECKED,
    HOLDS_THE_INTERPRETER,
    assert_ends_with_its_parent,
    connected,
    has_gone,
    launched,
    num_handles,
)
from worlds.gated_engine import (
    GREEDY,
    HANG,
    LONG,
    asking,
    collect,
    outcome_of,
    outcomes,
    reasons_of,
    text_of,
    tokens_of,
    until,
    within,
)

Apart = tuple[EngineProcess, EngineInfo]
MAX_OPEN = 14
# Loading torch in one more process takes a while on a busy machine.
PATIENCE = 4 * HANG
ROOT = Path(__file__).resolve().parents[3]
BEAT = "import sys; from engine.process.pulse import Pulse; Pulse(int(sys.argv[1])).beat()"


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    """An engine for all tests that leave it as it was, and what it says of itself."""
    with launched(max_num_waiting=MAX_OPEN) as process:
        yield process, process.start()


@within(PATIENCE)
async def test_streams_are_the_texts_that_an_engine_in_this_process_writes(apart: Apart) -> None:
    heard: list[StepStats] = []
    async with connected(*apart) as engine:
        engine.add_step_listener(heard.append)
        requests = [asking(f"r{index}") for index in range(12)]
        found = await asyncio.gather(*(collect(engine.generate(r)) for r in requests))
        for request, events in zip(requests, found, strict=True):
            assert tokens_of(events) == text_of(request)
            assert reasons_of(events) == ["length"]
            assert events[-1].finish is not None
            assert events[-1].finish.num_output_tokens == GREEDY.max_tokens
        assert sum(each.num_emitted_tokens for each in heard) == 12 * GREEDY.max_tokens
        assert heard[-1].num_running == 0
        assert engine.num_open == 0


@within(PATIENCE)
async def test_refusals_come_as_they_are_raised(apart: Apart) -> None:
    async with connected(*apart) as engine:
        empty = replace(asking("a"), prompt_token_ids=())
        with pytest.raises(RequestError, match="the prompt has no tokens") as refused:
            await collect(engine.generate(empty))
        assert refused.value.param == "prompt"
        odd = SpeculativeParams(draft_strategy=CHECKED, options={"ngram_max": 5})
        with pytest.raises(RequestError, match="an odd ngram_max") as refused:
            await collect(engine.generate(replace(asking("b"), speculative=odd)))
        assert refused.value.param == "speculative.options"
        heard: list[StepStats] = []
        engine.add_step_listener(heard.append)
        readers = [
            asyncio.create_task(collect(engine.generate(asking(f"r{index}", LONG, "none"))))
            for index in range(MAX_OPEN)
        ]
        await until(lambda: bool(heard) and heard[-1].num_waiting > 0)
        with pytest.raises(RequestError, match="request id 'r0' is in use"):
            await collect(engine.generate(asking("r0")))
        with pytest.raises(QueueFullError, match="queue is full") as full:
            await collect(engine.generate(asking("late")))
        assert full.value.retry_after_seconds >= 1
        for each in readers:
            each.cancel()
        await until(lambda: heard[-1].num_running == heard[-1].num_waiting == 0)
        assert await outcome_of(collect(engine.generate(asking("late")))) == "length"


@within(PATIENCE)
async def test_a_reader_that_leaves_ends_its_request_in_the_engine(apart: Apart) -> None:
    heard: list[StepStats] = []
    async with connected(*apart) as engine:
        engine.add_step_listener(heard.append)
        stream = engine.generate(asking("r", replace(LONG, max_tokens=230), "none"))
        await anext(stream)
        await stream.aclose()
        await until(lambda: heard[-1].num_running == 0)
        held = heard[-1].blocks
        assert held["committed"] == held["draft"] == 0
        assert sum(each.num_emitted_tokens for each in heard) < 230


@within(PATIENCE)
async def test_a_tenants_limits_hold_over_all_clients(apart: Apart) -> None:
    async with connected(*apart) as one, connected(*apart) as other:
        tenant = Tenant("a", max_concurrent_requests=1)
        stream = one.generate(replace(asking("r", LONG), tenant=tenant))
        await anext(stream)
        with pytest.raises(TenantLimitError) as error:
            await anext(other.generate(replace(asking("s"), tenant=tenant)))
        assert error.value.code == "too_many_concurrent"
        assert tokens_of(await collect(other.generate(asking("t")))) == text_of(asking("t"))
        await stream.aclose()
        while True:  # until the engine has heard of it
            try:
                events = await collect(other.generate(replace(asking("s"), tenant=tenant)))
            except TenantLimitError:
                continue
            assert tokens_of(events) == text_of(asking("s"))
            return


@within(PATIENCE)
async def test_two_clients_get_their_own_events_and_one_of_them_the_steps(apart: Apart) -> None:
    async with connected(*apart) as first:
        heard: tuple[list[StepStats], list[StepStats]] = ([], [])
        second = RemoteEngine(first.info, apart[0].connect(wants_steps=False))
        await second.start()
        first.add_step_listener(heard[0].append)
        second.add_step_listener(heard[1].append)
        with pytest.raises(RequestError, match="in use"):
            await asyncio.gather(
                *(collect(each.generate(asking("same", LONG))) for each in (first, second))
            )
        found = await asyncio.gather(
            collect(first.generate(asking("a"))), collect(second.generate(asking("b")))
        )
        assert [tokens_of(events) for events in found] == [text_of(asking("r"))] * 2
        assert heard[0]
        assert heard[1] == []
        # One leaves in the middle of a request, without a word.
        left = second.generate(asking("left", LONG, "none"))
        await anext(left)
        second._lose("it left")
        await until(lambda: heard[0][-1].num_running == 0)
        assert await outcome_of(collect(first.generate(asking("c")))) == "length"


@within(PATIENCE)
async def test_a_killed_engine_is_told_to_everybody_and_comes_back() -> None:
    with launched() as process:
        async with connected(process) as engine:
            process.watch(lambda info: engine.replace(info, process.connect()))
            before = num_handles()
            readers = outcomes(engine, "abcdef", LONG, "none")
            await until(lambda: engine.num_open == 6)
            await asyncio.sleep(0.02)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            assert await asyncio.gather(*readers) == ["EngineDeadError"] * 6
            assert not engine.is_alive
            with pytest.raises(EngineDeadError):
                await anext(engine.generate(asking("late")))
            await until(lambda: engine.is_alive)
            assert tokens_of(await collect(engine.generate(asking("r")))) == text_of(asking("r"))
            assert num_handles() <= before


def test_one_that_is_stopped_while_it_is_launched_anew_has_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch_child, pids = launch.launch_child, list[int]()
    again, stopped = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **more: Any) -> launch.Child:
        child = launch_child(*arguments, **more)
        pids.append(child.process.pid)
        if len(pids) > 1:
            again.set()
            stopped.wait(1)
        return child

    monkeypatch.setattr(launch, "launch_child", slowly)
    with launched() as process:
        process.start()
        process.watch(lambda _: None)
        os.kill(pids[0], signal.SIGKILL)
        assert again.wait(HANG)
    stopped.set()
    assert has_gone(pids[1])
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == [
        "the engine's process ended: signal SIGKILL"
    ]


@within(PATIENCE)
async def test_an_engine_that_breaks_says_how() -> None:
    with launched("die:3") as process:
        async with connected(process) as engine:
            process.watch(None)
            readers = [
                asyncio.create_task(collect(engine.generate(asking(name, LONG, "none"))))
                for name in "abcdef"
            ]
            for result in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
                assert "the device is gone" in str(result)
            assert not engine.is_alive
            assert process.pid is not None
            await until(lambda: has_gone(process.pid or 0))


@within(3 * PATIENCE)
async def test_an_engine_that_hangs_is_seen_ended_and_brought_back() -> None:
    with launched("hang:3") as process:
        async with connected(process) as engine:
            # Long enough for a busy machine's first step.
            process.watch(lambda info: engine.replace(info, process.connect()), 4.0)
            for place in ("at rest", "at admission", "in a step"):
                before, reading = process.pid, None
                assert before is not None
                if place == "at rest":
                    os.kill(before, signal.SIGSTOP)
                else:
                    options = HOLDS_THE_INTERPRETER if place == "at admission" else {}
                    speculative = SpeculativeParams(draft_strategy=CHECKED, options=options)
                    request = replace(asking(place, LONG), speculative=speculative)
                    reading = asyncio.create_task(outcome_of(collect(engine.generate(request))))
                await until(lambda: engine.stalled_seconds > 0.5)
                assert engine.is_alive
                await until(lambda before=before: process.pid != before and engine.is_alive)
                assert reading is None or await reading == "EngineDeadError"
            short = asking("s", replace(GREEDY, max_tokens=2), "none")
            assert tokens_of(await collect(engine.generate(short))) == text_of(short)
            await until(lambda: engine.stalled_seconds == 0)


@within(PATIENCE)
async def test_a_deadline_holds_where_the_engine_does_not_answer(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_GRACE_SECONDS", 0.01)
    async with connected(*apart) as engine:
        pid = apart[0].pid
        assert pid is not None
        endless = replace(LONG, max_tokens=230)
        begun = engine.generate(replace(asking("b", endless), deadline=time.perf_counter() + 1))
        num_tokens = len((await anext(begun)).token_ids)
        os.kill(pid, signal.SIGSTOP)
        try:
            late = replace(asking("r"), deadline=time.perf_counter())
            with pytest.raises(DeadlineExceededError, match=" 0 tokens"):
                await collect(engine.generate(late))
            with pytest.raises(DeadlineExceededError) as caught:
                num_tokens += len(tokens_of([each async for each in begun]))
            assert caught.value.num_output_tokens >= num_tokens
        finally:
            os.kill(pid, signal.SIGCONT)
        assert engine.num_open == 0
        assert tokens_of(await collect(engine.generate(asking("s")))) == text_of(asking("s"))


def test_what_cannot_be_built_says_why() -> None:
    with launched("refuse") as process, pytest.raises(EngineError, match="it has wheels"):
        process.start()
    with launched("crash") as process, pytest.raises(EngineError, match="loaded: status 7"):
        process.start()


@pytest.mark.parametrize("seconds", [0.0, HANG])
@within(PATIENCE)
async def test_stopping_drains_or_aborts(apart: Apart, seconds: float) -> None:
    async with connected(*apart) as engine:
        readers = outcomes(engine, "abcdef", LONG)
        await until(lambda: engine.num_open == 6)
        stopping = asyncio.create_task(engine.stop(seconds))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            await anext(engine.generate(asking("late")))
        await stopping
        expected = "length" if seconds else "abort"
        assert await asyncio.gather(*readers) == [expected] * 6
        assert not engine.is_alive


@within(PATIENCE)
async def test_nothing_is_left_open() -> None:
    before = num_handles()
    with launched() as process:
        async with connected(process) as engine:
            await collect(engine.generate(asking("r")))
    assert process.pid is not None
    assert has_gone(process.pid)
    assert num_handles() == before


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_an_engine_does_not_outlive_a_server_that_is_killed(moment: str) -> None:
    code = (
        "from engine.config import EngineConfig\n"
        "from engine.process.launch import EngineProcess\n"
        "import threading\n"
        "p = EngineProcess(EngineConfig(max_num_seqs=4), build='worlds.engine_apart:build')\n"
        "t = threading.Thread(target=p.start); t.start()\n"
        f"{'t.join()' if moment == 'serving' else ''}\n"
        "while p.pid is None: time.sleep(0.01)\n"
        "print(p.pid, flush=True); time.sleep(600)\n"
    )
    assert_ends_with_its_parent(code)


@within(PATIENCE)
async def test_signals_to_the_whole_group_leave_the_engine_to_its_server(apart: Apart) -> None:
    async with connected(*apart) as engine:
        reading = asyncio.create_task(collect(engine.generate(asking("r", LONG, "none"))))
        await until(lambda: engine.num_open == 1)
        assert apart[0].pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(apart[0].pid, number)
        assert reasons_of(await reading) == ["length"]


@within(PATIENCE)
async def test_charges_of_all_clients_are_counted_together(apart: Apart) -> None:
    tenant = Tenant("charged", requests_per_minute=1)
    async with connected(*apart) as first, connected(*apart) as second:
        await first.charge(tenant)
        with pytest.raises(TenantLimitError) as caught:
            await second.charge(tenant)
        assert caught.value.code == "rate_limited"


def test_another_process_s_beat_is_seen_and_goes_on_without_it() -> None:
    handle = shared_handle()
    pulse = Pulse(handle)
    assert pulse.stalled_seconds == 0
    command = [sys.executable, "-c", BEAT, str(handle)]
    subprocess.run(command, pass_fds=[handle], cwd=ROOT, check=True)
    os.close(handle)
    first = pulse.stalled_seconds
    assert 0 < first < pulse.stalled_seconds
    assert not pulse.ask()
    pulse.resume()
    assert pulse.stalled_seconds < first
    pulse.rest()
    assert pulse.stalled_seconds == 0
    assert pulse.ask()
    assert pulse.stalled_seconds > 0
    assert not pulse.ask()
    pulse.rest()
    assert pulse.stalled_seconds == 0
    pulse.beat()
    pulse.close()
    assert Pulse().stalled_seconds == pulse.stalled_seconds == 0
