"""The asyncio edge: streams, admission and backpressure, and how streams end: clients that leave, an
engine that dies, a shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from engine.request.errors import (
    EngineDeadError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    ShuttingDownError,
    TenantLimitError,
)
from engine.request.params import Batch, GenerationRequest, Tenant
from engine.request.stats import StepStats
from worlds.engine_harness import drafting, request
from worlds.gated_engine import (
    GREEDY,
    HANG,
    LONG,
    PROMPT,
    Engine,
    asking,
    collect,
    outcome_of,
    outcomes,
    reasons_of,
    running,
    text_of,
    tokens_of,
    until,
    within,
)

# --- streams ---


@within(HANG)
async def test_streams_are_the_requests_texts() -> None:
    async with running(Engine(max_num_seqs=3)) as engine:
        requests = [
            request(f"r{index}", PROMPT[: 2 + index], GREEDY, drafting(drafter))
            for index, drafter in enumerate(["none", "ngram", "nasd", "nasd_one_level"])
        ]
        streams = await asyncio.gather(*(collect(engine.generate(each)) for each in requests))
        for each, events in zip(requests, streams, strict=True):
            assert tokens_of(events) == text_of(each)
            assert [event.finish is not None for event in events[:-1]] == [False] * (
                len(events) - 1
            )
            assert reasons_of(events) == ["length"]
        assert engine.num_open == 0
        assert engine.num_held_blocks == 0


@within(HANG)
async def test_one_cross_thread_call_per_step() -> None:
    engine = Engine()
    loop = asyncio.get_running_loop()
    post, calls = loop.call_soon_threadsafe, []

    def counting(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
        if threading.current_thread().name == "slipstream-engine":
            calls.append(callback)
        return post(callback, *args, **kwargs)

    loop.call_soon_threadsafe = counting  # type: ignore[assignment, method-assign]
    async with running(engine):
        names = [f"r{index}" for index in range(8)]
        await asyncio.gather(*(collect(engine.generate(asking(name))) for name in names))
        assert len(calls) == engine.runner.num_forwards > 0


@within(HANG)
async def test_listeners_hear_of_every_step() -> None:
    heard: list[StepStats] = []
    async with running(Engine()) as engine:
        engine.add_step_listener(heard.append)
        await asyncio.gather(*(collect(engine.generate(asking(name))) for name in "abc"))
        assert len(heard) == engine.runner.num_forwards
        assert sum(stats.num_emitted_tokens for stats in heard) == 3 * GREEDY.max_tokens


@within(HANG)
async def test_listeners_hear_when_aborts_leave_nothing_to_run() -> None:
    """Otherwise gauges would go on telling of the request that was the last."""
    async with running(Engine(gated=True)) as engine:
        heard: asyncio.Queue[StepStats] = asyncio.Queue()
        engine.add_step_listener(heard.put_nowait)
        reader = asyncio.create_task(collect(engine.generate(asking("r"))))
        engine.runner.allow(1)
        stats = await heard.get()
        assert (stats.num_running, stats.num_rows > 0) == (1, True)
        # The step that waits for its permit ends; the abort comes before the next.
        engine.abort("r")
        engine.runner.open_gate()
        while stats.num_rows:
            stats = await heard.get()
        assert reasons_of(await reader) == ["abort"]
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.blocks["committed"] == stats.blocks["draft"] == 0


@within(HANG)
async def test_a_reader_who_dawdles_delays_nobody() -> None:
    async with running(Engine()) as engine:
        slow = engine.generate(asking("slow"))
        first = await anext(slow)
        others = await asyncio.gather(*(collect(engine.generate(asking(n))) for n in "abc"))
        assert all(tokens_of(events) == text_of(asking("r")) for events in others)
        rest = await collect(slow)
        assert tokens_of([first, *rest]) == text_of(asking("slow"))


@within(HANG)
async def test_the_event_loop_runs_while_a_step_does() -> None:
    engine = Engine(gated=True)
    async with running(engine):
        reading = asyncio.create_task(collect(engine.generate(asking("r"))))
        await until(lambda: engine.core.has_work)
        for _ in range(1000):  # would never end if the loop waited for the step
            await asyncio.sleep(0)
        assert not reading.done()
        assert engine.runner.num_forwards == 0
        engine.runner.open_gate()
        assert tokens_of(await reading) == text_of(asking("r"))


# --- admission ---


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (1,) * 256}, "prompt"),
        ({"prompt_token_ids": (8,)}, "prompt"),
        ({"prompt_token_ids": (-1,)}, "prompt"),
        ({"sampling": replace(GREEDY, max_tokens=0)}, "max_tokens"),
        ({"sampling": replace(GREEDY, stop_token_ids=(8,))}, "stop_token_ids"),
        ({"speculative": drafting("oracle")}, "speculative.draft_strategy"),
        ({"speculative": drafting("ngram", "hunch")}, "speculative.adaptive_depth"),
    ],
)
@within(HANG)
async def test_impossible_requests_are_refused(changes: dict[str, Any], param: str) -> None:
    async with running(Engine()) as engine:
        with pytest.raises(RequestError) as error:
            await anext(engine.generate(replace(asking("r"), **changes)))
        assert error.value.param == param
        assert engine.num_open == 0
        assert engine.runner.num_forwards == 0


@within(HANG)
async def test_the_longest_prompt_has_room_for_one_token() -> None:
    async with running(Engine()) as engine:
        each = replace(asking("r"), prompt_token_ids=(1,) * 255)
        assert len(tokens_of(await collect(engine.generate(each)))) == 1


@within(HANG)
async def test_an_id_in_use_is_refused_and_free_afterwards() -> None:
    async with running(Engine()) as engine:
        first = engine.generate(asking("r"))
        await anext(first)
        with pytest.raises(RequestError) as error:
            await anext(engine.generate(asking("r")))
        assert error.value.param == "request_id"
        await collect(first)
        events = await collect(engine.generate(asking("r")))
        assert tokens_of(events) == text_of(asking("r"))


@within(HANG)
async def test_a_batch_is_let_in_whole_or_not_at_all() -> None:
    async with running(Engine(gated=True, max_num_open=4)) as engine:
        reader = asyncio.create_task(collect(engine.generate(asking("alone"))))
        await until(lambda: engine.num_open == 1)
        too_many = [batched(f"x{index}", "x", 4) for index in range(4)]
        for each in too_many:  # for the first three alone there would be room
            with pytest.raises(QueueFullError):
                await anext(engine.generate(each))
        assert engine.num_open == 1
        fitting = [batched(f"y{index}", "y", 3) for index in range(3)]
        readers = [asyncio.create_task(collect(engine.generate(each))) for each in fitting]
        await until(lambda: engine.num_open == 4)
        with pytest.raises(RequestError, match="5 choices: this server takes at most 4") as error:
            await anext(engine.generate(batched("z", "z", 5)))
        assert error.value.param == "prompt"
        engine.runner.open_gate()
        found = await asyncio.gather(reader, *readers)
        assert [tokens_of(each) for each in found[1:]] == [text_of(each) for each in fitting]


@within(HANG)
async def test_a_batch_in_parts_needs_no_more_places_but_what_it_costs_in_all() -> None:
    tenant = Tenant("t", tokens_per_minute=len(asking("z").prompt_token_ids))
    size = 3  # of which the first alone costs what a minute has
    asked = [replace(batched(f"z{index}", "z", size), tenant=tenant) for index in range(size)]
    async with running(Engine(max_num_open=1)) as engine:
        for each in asked:
            assert each.batch is not None
            part = replace(each, batch=each.batch._replace(num_at_once=1))
            assert tokens_of(await collect(engine.generate(part))) == text_of(part)
        with pytest.raises(TenantLimitError, match="tokens per minute"):
            await anext(engine.generate(replace(asking("y"), tenant=tenant)))


def batched(name: str, batch: str, size: int) -> GenerationRequest:
    return replace(asking(name), batch=Batch(batch, size, size, size))


@within(HANG)
async def test_a_full_queue_says_when_to_return() -> None:
    async with running(Engine(gated=True, max_num_open=2)) as engine:
        readers = [asyncio.create_task(collect(engine.generate(asking(name)))) for name in "ab"]
        await until(lambda: engine.num_open == 2)
        with pytest.raises(QueueFullError) as error:
            await anext(engine.generate(asking("c")))
        assert 1 <= error.value.retry_after_seconds <= 60
        assert engine.num_open == 2
        engine.runner.open_gate()
        await asyncio.gather(*readers)
        assert tokens_of(await collect(engine.generate(asking("c")))) == text_of(asking("c"))


# --- steps that take long ---


@within(HANG)
async def test_how_long_a_step_takes_is_seen_while_it_does() -> None:
    engine = Engine(gated=True)
    async with running(engine):
        assert engine.stalled_seconds == 0
        reading = asyncio.create_task(collect(engine.generate(asking("r"))))
        await until(lambda: engine.runner.num_entered == 1)
        first = engine.stalled_seconds
        await until(lambda: engine.stalled_seconds > first > 0)
        engine.runner.open_gate()
        assert tokens_of(await reading) == text_of(asking("r"))
        await until(lambda: engine.stalled_seconds == 0)


# --- aborts ---


@pytest.mark.parametrize("how", ["close", "cancel"])
@within(HANG)
async def test_a_client_who_leaves_frees_the_blocks_within_one_step(how: str) -> None:
    engine = Engine(gated=True)
    async with running(engine):
        stream = engine.generate(asking("r", LONG, "none"))
        reader = asyncio.create_task(anext(stream))
        engine.runner.allow(1)
        await reader
        await until(lambda: engine.runner.num_entered == 2)
        assert engine.num_held_blocks > 0
        if how == "close":
            await stream.aclose()
        else:
            second = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            second.cancel()
            with suppress(asyncio.CancelledError):
                await second
        assert engine.num_open == 0
        engine.runner.allow(1)
        await until(lambda: not engine.core.has_work)
        assert engine.num_held_blocks == 0
        assert engine.runner.num_forwards == 2


@within(HANG)
async def test_leaving_before_the_first_step_leaves_nothing() -> None:
    engine = Engine(gated=True, max_num_seqs=1)
    async with running(engine):
        ahead = asyncio.create_task(collect(engine.generate(asking("ahead"))))
        await until(lambda: engine.core.has_work)
        waiting = asyncio.create_task(collect(engine.generate(asking("waiting"))))
        await until(lambda: engine.num_open == 2)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        engine.runner.open_gate()
        assert tokens_of(await ahead) == text_of(asking("ahead"))
        await until(lambda: not engine.core.has_work)
        assert len(engine.core.scheduler.waiting) == 0


@within(HANG)
async def test_abort_by_id_gives_the_reader_a_last_event() -> None:
    engine = Engine(gated=True)
    async with running(engine):
        reader = asyncio.create_task(collect(engine.generate(asking("r", LONG, "none"))))
        engine.runner.allow(3)
        await until(lambda: engine.runner.num_forwards == 3)
        engine.abort("r")
        engine.runner.open_gate()
        events = await reader
        assert reasons_of(events) == ["abort"]
        finish = events[-1].finish
        assert finish is not None
        assert finish.num_output_tokens == len(tokens_of(events)) >= 3
        assert tokens_of(events) == text_of(asking("r", LONG))[: finish.num_output_tokens]


@within(HANG)
async def test_neighbours_do_not_notice_who_leaves() -> None:
    async with running(Engine()) as engine:
        stays = [asyncio.create_task(collect(engine.generate(asking(n)))) for n in "abc"]
        for index in range(10):
            leaver = engine.generate(asking(f"leaver-{index}", LONG))
            await anext(leaver)
            await leaver.aclose()
        for events in await asyncio.gather(*stays):
            assert tokens_of(events) == text_of(asking("r"))
        await until(lambda: not engine.core.has_work)
        assert engine.num_held_blocks == 0


# --- death ---


@within(HANG)
async def test_death_reaches_everyone_now_and_later() -> None:
    engine = Engine(gated=True, max_num_seqs=2)
    engine.runner.dies_at = 3
    async with running(engine):
        readers = [
            asyncio.create_task(collect(engine.generate(asking(name, LONG, "none"))))
            for name in "abcd"
        ]
        await until(lambda: engine.num_open == 4)
        assert engine.is_alive
        engine.runner.open_gate()
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "the device is gone" in str(result)
        assert not engine.is_alive
        assert engine.num_open == 0
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await anext(engine.generate(asking("late")))


@within(HANG)
async def test_a_command_that_breaks_the_engine_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    monkeypatch.setattr(engine.core.scheduler, "submit", None)
    async with running(engine):
        with pytest.raises(EngineDeadError, match="TypeError"):
            await collect(engine.generate(asking("r")))


@within(HANG)
async def test_a_request_that_fails_ends_its_stream_and_no_other() -> None:
    engine = Engine()
    del engine.core.speculation.drafters["ngram"]  # type: ignore[attr-defined]
    async with running(engine):
        with pytest.raises(RequestFailedError, match="KeyError"):
            await collect(engine.generate(asking("r")))
        other = asking("other", drafter="none")
        assert tokens_of(await collect(engine.generate(other))) == text_of(other)
        assert engine.num_open == engine.num_held_blocks == 0


@within(HANG)
async def test_an_engine_never_started_is_dead() -> None:
    engine = Engine()
    assert not engine.is_alive
    with pytest.raises(EngineDeadError):
        await anext(engine.generate(asking("r")))
    await engine.stop()


# --- shutdown ---


@pytest.mark.parametrize("drain_seconds", [0.0, 0.01])
@within(HANG)
async def test_stop_aborts_what_the_drain_time_leaves(drain_seconds: float) -> None:
    engine = Engine(gated=True, max_num_seqs=2)
    async with running(engine):
        readers = outcomes(engine, "abcd", LONG)
        await until(lambda: engine.core.has_work and engine.num_open == 4)
        stopping = asyncio.create_task(engine.stop(drain_seconds))
        await asyncio.sleep(2 * drain_seconds)
        assert not stopping.done()  # the step that is under way is let finish
        engine.runner.open_gate()
        await stopping
        assert await asyncio.gather(*readers) == ["abort"] * 4
        assert not engine.is_alive
        assert engine.num_held_blocks == 0
        with pytest.raises(EngineDeadError):
            await anext(engine.generate(asking("late")))


@within(HANG)
async def test_stop_lets_open_requests_finish_and_admits_no_more() -> None:
    engine = Engine(gated=True, max_num_seqs=2)
    async with running(engine):
        readers = [asyncio.create_task(collect(engine.generate(asking(n)))) for n in "abcd"]
        await until(lambda: engine.num_open == 4)
        stopping = asyncio.create_task(engine.stop(drain_seconds=HANG))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            await anext(engine.generate(asking("late")))
        engine.runner.open_gate()
        await stopping
        for events in await asyncio.gather(*readers):
            assert reasons_of(events) == ["length"]
            assert tokens_of(events) == text_of(asking("r"))
        assert not engine.is_alive


@within(HANG)
async def test_stop_after_death_and_twice_is_harmless() -> None:
    engine = Engine()
    engine.runner.dies_at = 1
    await engine.start()
    assert await outcome_of(collect(engine.generate(asking("r")))) == "EngineDeadError"
    await engine.stop(drain_seconds=HANG)
    await engine.stop()


@within(HANG)
async def test_one_last_event_each_whatever_happens_together() -> None:
    """Finishing, leaving, aborting and stopping at once."""
    engine = Engine(max_num_seqs=3)
    async with running(engine):
        ends = [
            asyncio.create_task(outcome_of(collect(engine.generate(asking(f"r{index}", sampling)))))
            for index, sampling in enumerate([GREEDY, LONG] * 10)
        ]
        await until(lambda: engine.runner.num_forwards > 10)
        for index in range(0, 20, 3):
            engine.abort(f"r{index}")
        await engine.stop()
        assert set(await asyncio.gather(*ends)) <= {"length", "abort"}
        assert engine.num_open == 0
        assert engine.num_held_blocks == 0
