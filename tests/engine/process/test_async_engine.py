"""The asyncio edge: streams, admission and backpressure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.request.errors import QueueFullError, RequestError, TenantLimitError
from engine.request.params import Batch, GenerationRequest, Tenant
from engine.request.stats import StepStats
from worlds.engine_harness import drafting, request
from worlds.gated_engine import (
    GREEDY,
    HANG,
    PROMPT,
    Engine,
    asking,
    collect,
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
