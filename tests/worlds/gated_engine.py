"""An asyncio engine on a scripted target whose every step waits for a permit, and ways to drive it.

No clock is looked at: where order matters, the test gives the permits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from engine.batch import ForwardOutput, InputBatch
from engine.process.threaded import AsyncEngine
from engine.request.errors import EngineError
from engine.request.events import TokenEvent
from engine.request.info import EngineInfo
from engine.request.params import GenerationRequest, SamplingParams
from worlds.engine_harness import Setup, build_core, drafting, request
from worlds.scripted_target import ScriptedRunner, ScriptedTarget

TARGET = ScriptedTarget(8)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = replace(GREEDY, max_tokens=200)
HANG = 300.0
"""Seconds after which a test that waits is taken to hang; a busy machine is no fault."""


class GatedRunner(ScriptedRunner):
    """Every forward takes a permit; the test gives them, or opens the gate for good."""

    def __init__(self, setup: Setup, gated: bool) -> None:
        super().__init__(TARGET, setup.num_blocks, setup.block_size)
        self.num_entered = 0
        self.num_forwards = 0
        self.dies_at: int | None = None
        self._permits = threading.Semaphore(0)
        self._is_open = not gated

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open_gate(self) -> None:
        self._is_open = True
        self._permits.release()

    def forward(self, batch: InputBatch) -> ForwardOutput:
        self.num_entered += 1
        assert self._is_open or self._permits.acquire(timeout=HANG)
        self.num_forwards += 1
        if self.num_forwards == self.dies_at:
            raise MemoryError("the device is gone")
        return super().forward(batch)


class Engine(AsyncEngine):
    """An engine on a gated target, and what a test wants to see of it."""

    def __init__(self, gated: bool = False, max_num_open: int = 100, **setup: Any) -> None:
        sizes = Setup().but(**setup)
        self.runner = GatedRunner(sizes, gated)
        self.core = build_core(self.runner, TARGET.vocab_size, sizes)
        info = EngineInfo(
            model="scripted",
            vocab_size=TARGET.vocab_size,
            max_model_len=self.core.limits.max_model_len,
            max_num_nodes=sizes.max_num_nodes,
            eos_token_ids=(),
            drafters={name: each.info for name, each in self.core.speculation.drafters.items()},
            device="cpu",
            dtype="none",
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_num_open=max_num_open,
            num_parameters=0,
            determinism="exact",
            attention_backend="paged",
            exact_verified=None,
        )
        super().__init__(self.core, info, max_num_open)

    @property
    def num_held_blocks(self) -> int:
        counts = self.core.pool.counts()
        return counts["committed"] + counts["draft"]


@asynccontextmanager
async def running(engine: Engine) -> AsyncGenerator[Engine, None]:
    await engine.start()
    try:
        yield engine
    finally:
        engine.runner.open_gate()
        await engine.stop()


def within(seconds: float) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
    """Runs a test on an event loop of its own, where it fails after so many seconds."""

    def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        @wraps(test)
        def run(*given: Any, **named: Any) -> None:
            asyncio.run(asyncio.wait_for(test(*given, **named), seconds))

        return run

    return on_a_loop


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def asking(
    name: str, sampling: SamplingParams = GREEDY, drafter: str = "ngram"
) -> GenerationRequest:
    return request(name, PROMPT, sampling, drafting(drafter))


def text_of(each: GenerationRequest) -> list[int]:
    return TARGET.stream(each, (), 256)[0]


async def collect(stream: AsyncGenerator[TokenEvent, None]) -> list[TokenEvent]:
    return [event async for event in stream]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def reasons_of(events: list[TokenEvent]) -> list[str]:
    return [event.finish.reason for event in events if event.finish is not None]


def outcomes(engine: Any, names: Iterable[str], *how: Any) -> list[asyncio.Task[str]]:
    """Tasks that read requests which are asked ``how`` to their ends."""
    return [
        asyncio.create_task(outcome_of(collect(engine.generate(asking(name, *how)))))
        for name in names
    ]


async def outcome_of(events: Awaitable[list[TokenEvent]]) -> str:
    """How a stream ended: its one finish reason, or the name of what was raised."""
    try:
        (reason,) = reasons_of(await events)
    except EngineError as error:
        return type(error).__name__
    return reason
