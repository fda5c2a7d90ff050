"""How streams end at the asyncio edge: clients that leave, an engine that dies, a shutdown."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from engine.request.errors import EngineDeadError, RequestFailedError, ShuttingDownError
from worlds.gated_engine import (
    GREEDY,
    HANG,
    LONG,
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
        outcomes = [
            asyncio.create_task(outcome_of(collect(engine.generate(asking(f"r{index}", sampling)))))
            for index, sampling in enumerate([GREEDY, LONG] * 10)
        ]
        await until(lambda: engine.runner.num_forwards > 10)
        for index in range(0, 20, 3):
            engine.abort(f"r{index}")
        await engine.stop()
        assert set(await asyncio.gather(*outcomes)) <= {"length", "abort"}
        assert engine.num_open == 0
        assert engine.num_held_blocks == 0
