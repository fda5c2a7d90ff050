"""Engines in processes that come and go: nothing is left of one that was ended, however far it was."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.hub.memory import available_bytes
from engine.process.client import RemoteEngine
from engine.process.memory import own_bytes
from engine.request.errors import EngineDeadError, EngineError
from server.app import Shared, services_of
from server.metrics.prometheus import Metrics
from server.models.launcher import EngineLauncher
from server.models.services import Services
from server.request.speculative import SpeculativeChange, SpeculativeField, SpeculativeResolver
from server.response_store import ResponseStore
from server.settings import Settings
from server.workers.parent import wished
from worlds.engine_apart import num_handles, wait_until_gone
from worlds.gated_engine import asking
from worlds.scripted_engine import byte_tokenizer
from worlds.serving import until


def _launcher(model: str | None = None, step_timeout: float = 300.0) -> EngineLauncher:
    def answer(engine: RemoteEngine, resolver: SpeculativeResolver | None) -> Services:
        known = {} if resolver is None else wished(resolver)
        settings = Settings(body_processes=0).model_copy(update=known)
        shared = Shared(Metrics(engine.info, "apart"), None, ResponseStore(1).ask)
        return services_of(engine, byte_tokenizer(), settings, shared, may_go=True)

    config = EngineConfig(model=model, max_num_seqs=4)
    build = "worlds.engine_apart:build"
    return EngineLauncher(config, answer, build=build, step_timeout=step_timeout)


@asynccontextmanager
async def _launcher_of(*given: Any) -> AsyncIterator[EngineLauncher]:
    found = _launcher(*given)
    try:
        yield found
    finally:
        await found.stop()


def _pid(launcher: EngineLauncher) -> int:
    return launcher._process.pid


async def test_an_engine_is_ended_and_launched_again_with_what_was_changed() -> None:
    async with _launcher_of() as launcher:
        first = await launcher.launch(0)
        pid, before = _pid(launcher), num_handles()
        assert launcher.needed_bytes > own_bytes(pid) / 2 > 0
        change = SpeculativeChange(defaults=SpeculativeField(draft_strategy="suffix"))
        await first.change_speculation(change, from_built_in=False)
        events = [each async for each in first.engine.generate(asking("a"))]
        await launcher.stop()
        wait_until_gone(pid)
        with pytest.raises(EngineDeadError):
            await anext(first.engine.generate(asking("late")))
        second = await launcher.launch(0)
        assert second.resolver.defaults.draft_strategy == "suffix"
        again = [each async for each in second.engine.generate(asking("a"))]
        assert _tokens(again) == _tokens(events)
        os.kill(_pid(launcher), signal.SIGKILL)
        await until(lambda: not second.engine.is_alive)
        await launcher.stop()
        assert num_handles() < before


def _tokens(events: list[Any]) -> list[int]:
    return [token for each in events for token in each.token_ids]


@pytest.mark.slow
async def test_nothing_is_left_of_what_does_not_load() -> None:
    before = num_handles()
    for model, reason in (("refuse", "it has wheels"), ("crash", "status 7")):
        launcher = _launcher(model)
        with pytest.raises(EngineError, match=reason):
            await launcher.launch(0)
        assert launcher.promised_bytes == 0
    assert num_handles() <= before


async def test_an_engine_is_ended_while_it_loads() -> None:
    async with _launcher_of() as launcher:
        loading = asyncio.ensure_future(launcher.launch(0))
        await until(lambda: launcher._process is not None)
        pid = _pid(launcher)
        await launcher.stop()
        with pytest.raises(EngineError):
            await loading
        wait_until_gone(pid)


async def test_a_load_that_is_cancelled_leaves_nothing() -> None:
    async with _launcher_of() as launcher:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await launcher.launch(0)
        assert launcher._process is None


@pytest.mark.slow
async def test_an_engine_that_hangs_is_killed_and_its_requests_are_told() -> None:
    async with _launcher_of("hang:2", 0.5) as launcher:
        served = await launcher.launch(0)
        with pytest.raises(EngineDeadError):
            _ = [each async for each in served.engine.generate(asking("a"))]
        assert not served.engine.is_alive


def test_weights_say_what_a_model_needs_at_least(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(3000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(5000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(2000))
    for part in (1, 2):
        (tmp_path / f"[one]-0000{part}-of-00002.gguf").write_bytes(bytes(400))

    def needed(**config: Any) -> EngineLauncher:
        return EngineLauncher(EngineConfig(**config), _launcher()._serve, step_timeout=1)

    assert needed(model=str(tmp_path)).file_bytes == 3000
    first = tmp_path / "[one]-00001-of-00002.gguf"
    assert needed(model=str(first)).file_bytes == 800
    more = needed(model=str(tmp_path), draft=(f"small_model={tmp_path}",)).needed_bytes
    assert more - needed(model=str(tmp_path)).needed_bytes == pytest.approx(3450, abs=2)
    assert needed(model=str(tmp_path), device="cuda").needed_bytes == 0
    assert needed(model="org/elsewhere").needed_bytes == 0


def test_memory_of_processes_is_read() -> None:
    assert own_bytes(os.getpid()) > 1 << 20
    assert own_bytes(2**22 + 1) == 0
    assert available_bytes() > 0
