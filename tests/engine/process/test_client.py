"""The server's end of the pipe, on the event loops that servers run on."""

from __future__ import annotations

import asyncio
import pickle
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import Pipe

import pytest
import uvloop

from engine.process.client import RemoteEngine
from engine.process.link import Link, _Call
from engine.request.errors import EngineDeadError, TenantLimitError
from engine.request.params import Tenant
from engine.request.stats import StepStats, idle_stats
from worlds.gated_engine import HANG, asking, until
from worlds.scripted_engine import ScriptedEngine

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_message_may_come_in_pieces(loop: str) -> None:
    """uvloop makes what it watches non-blocking, and half a message is no end of the engine."""

    async def check() -> None:
        ours, theirs = Pipe()
        engine = RemoteEngine(ScriptedEngine("").info, ours)
        seen: list[StepStats] = []
        engine.add_step_listener(seen.append)
        await engine.start()
        data = pickle.dumps(_Call("deliver", ([], [idle_stats(7)])))
        frame = struct.pack("!i", len(data)) + data
        rest = threading.Timer(0.1, theirs._send, [frame[9:]])  # type: ignore[attr-defined]
        theirs._send(frame[:9])  # type: ignore[attr-defined]
        rest.start()
        await until(lambda: bool(seen) or not engine.is_alive)
        assert seen == [idle_stats(7)]
        assert engine.is_alive
        theirs.close()
        await until(lambda: not engine.is_alive)

    _run(loop, check)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_the_pipe_has_no_room_for_is_not_lost(loop: str) -> None:
    async def check() -> None:
        ours, theirs = Pipe()
        engine = RemoteEngine(ScriptedEngine("").info, ours)
        await engine.start()
        long = replace(asking("long"), prompt_token_ids=tuple(range(300_000)))
        engine._submit(long)
        engine._submit(asking("short"))
        found: list[_Call] = await asyncio.to_thread(lambda: [theirs.recv(), theirs.recv()])
        assert [each.arguments[0].request_id for each in found] == ["long", "short"]
        assert found[0].arguments[0] == long
        theirs.close()
        await until(lambda: not engine.is_alive)

    _run(loop, check)


def test_a_charge_is_answered_or_told_that_nobody_is_left() -> None:
    async def check() -> None:
        ours, theirs = Pipe()
        engine = RemoteEngine(ScriptedEngine("").info, ours)
        await engine.start()
        peer = Link(theirs)
        asked: list[Tenant] = []
        answers: list[Future[None]] = []

        def charge(tenant: Tenant) -> Future[None]:
            asked.append(tenant)
            answers.append(Future())
            return answers[-1]

        peer.listen_in_thread({"charge": charge}, lambda: None)
        tenant = Tenant("a", requests_per_minute=1)
        charges = [asyncio.ensure_future(engine.charge(tenant)) for _ in range(4)]
        await until(lambda: len(answers) == 4)
        assert asked == [tenant] * 4
        charges[0].cancel()
        # In whatever order; whose client has gone is answered in vain.
        answers[2].set_exception(TenantLimitError("rate_limited", "too many", 3))
        answers[1].set_result(None)
        answers[0].set_result(None)
        await charges[1]
        with pytest.raises(TenantLimitError, match="too many"):
            await charges[2]
        peer.close()
        with pytest.raises(EngineDeadError):
            await charges[3]
        with pytest.raises(EngineDeadError):
            await engine.charge(tenant)

    _run("uvloop", check)


def _run(loop: str, check: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(asyncio.wait_for(check(), HANG))  # type: ignore[arg-type]
