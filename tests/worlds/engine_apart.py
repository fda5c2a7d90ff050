"""Engines on a scripted target in processes of their own, and how their processes build them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafters.base import OptionError
from engine.batch import ForwardOutput, InputBatch
from engine.config import EngineConfig
from engine.process.client import RemoteEngine
from engine.process.launch import EngineProcess
from engine.request.errors import UnsupportedModelError
from engine.request.info import EngineInfo
from worlds.gated_engine import HANG, Engine, GatedRunner

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 0.003
CHECKED = "ngram"
"""The drafter whose check of options does not pickle."""
HOLDS_THE_INTERPRETER = {"ngram_max": 6}
"""Options whose check keeps every other thread of the engine's process from running, for ever."""


class PacedRunner(GatedRunner):
    """Takes its time, and never comes back from the forward of this number."""

    hangs_at: int | None = None

    def forward(self, batch: InputBatch) -> ForwardOutput:
        if self.num_forwards + 1 == self.hangs_at:
            threading.Event().wait()
        time.sleep(STEP_SECONDS)
        return super().forward(batch)


def build(config: EngineConfig) -> tuple[Engine, None]:
    """Builds the engine in its process. ``config.model`` says what is to happen: ``refuse``, ``crash``,
    ``die:N`` or ``hang:N`` at the Nth forward, or nothing."""
    if config.model == "refuse":
        raise UnsupportedModelError("it has wheels")
    if config.model == "crash":
        os._exit(7)
    engine = Engine(max_num_open=config.max_num_waiting, max_num_seqs=config.max_num_seqs)
    engine.runner.__class__ = PacedRunner
    what, _, number = (config.model or "").partition(":")
    if what in ("die", "hang"):
        setattr(engine.runner, f"{what}s_at", int(number))
    drafters = dict(engine.info.drafters)
    drafters[CHECKED] = replace(drafters[CHECKED], check=lambda options: _fault(options))
    engine.info = engine.runtime.info = replace(engine.info, drafters=drafters)
    return engine, None


def _fault(options: Any) -> OptionError | None:
    if options["ngram_max"] == HOLDS_THE_INTERPRETER["ngram_max"]:
        ctypes.PyDLL(None).pause()
    return OptionError("an odd ngram_max") if options["ngram_max"] == 5 else None


@contextmanager
def launched(model: str | None = None, **config: Any) -> Iterator[EngineProcess]:
    process = EngineProcess(
        EngineConfig(model=model, max_num_seqs=4, **config), build="worlds.engine_apart:build"
    )
    try:
        yield process
    finally:
        process.stop()


@asynccontextmanager
async def connected(
    process: EngineProcess, info: EngineInfo | None = None
) -> AsyncGenerator[RemoteEngine, None]:
    """A started client of an engine, which is launched unless its ``info`` is there."""
    info = info or await asyncio.to_thread(process.start)
    engine = RemoteEngine(info, process.connect(), process.pulse)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def has_gone(pid: int) -> bool:
    """Whether there is no such process, or only what its parent has not asked for yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG
    while not has_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_ends_with_its_parent(code: str) -> None:
    """``code`` prints the id of a process that it has begun, and waits; then its own is killed."""
    command = [sys.executable, "-c", f"import sys, time; sys.path.insert(0, 'tests')\n{code}"]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not has_gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)


def num_handles() -> int:
    return len(os.listdir("/proc/self/fd"))
