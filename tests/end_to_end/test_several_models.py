"""``slipstream serve`` with two models as it comes: loaded when asked for, ended, killed, drained."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from worlds.engine_apart import wait_until_gone
from worlds.served_command import HANG, serving, until

pytestmark = pytest.mark.slow

ENGINE = b"engine.process.child"
CODE, HYBRID = "slipstream-bundled", "bundled_hybrid"
NUM_REQUESTS = 200


def _asked(number: int) -> dict[str, Any]:
    return {
        "model": (CODE, HYBRID)[number % 2],
        "prompt": f"def function_{number % 10}(",
        "max_tokens": 4 + number % 9,
        "seed": number,
        "temperature": (0, 0.8)[number // 2 % 2],
    }


async def _texts(url: str, numbers: range) -> dict[int, str]:
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=HANG
    ) as client:

        async def ask(number: int) -> str:
            body = _asked(number)
            if number % 3:
                return (await client.completions.create(**body)).choices[0].text
            stream = await client.completions.create(**body, stream=True)
            return "".join([each.choices[0].text async for each in stream])

        texts = await asyncio.gather(*map(ask, numbers))
        return dict(zip(numbers, texts, strict=True))


def test_two_models_answer_as_each_does_alone_and_come_and_go(tmp_path: Path) -> None:
    alone: dict[int, str] = {}
    for at, model in enumerate(("bundled", "bundled_hybrid")):
        folder = tmp_path / model
        folder.mkdir()
        with serving(folder, model=model) as server:
            alone |= asyncio.run(_texts(server.url, range(at, NUM_REQUESTS, 2)))
    flags = ("--keep-alive", "5m", "--drain-seconds", "60")
    with serving(tmp_path, *flags, model=("bundled", "bundled_hybrid")) as server:
        assert server.is_ready()
        assert server.children(ENGINE) == []
        assert asyncio.run(_texts(server.url, range(NUM_REQUESTS))) == alone
        code, hybrid = server.children(ENGINE)
        unload = {"model": HYBRID, "keep_alive": 0}
        httpx.post(f"{server.url}/api/generate", json=unload, timeout=HANG)
        until(lambda: len(server.children(ENGINE)) == 1)
        (left,) = server.children(ENGINE)
        assert left in (code, hybrid)
        os.kill(left, signal.SIGKILL)
        until(lambda: server.children(ENGINE) == [])
        assert server.status("health") == server.status("ready") == 200
        again = asyncio.run(_texts(server.url, range(4)))
        assert again == {number: alone[number] for number in range(4)}
        pids = server.children(ENGINE)
        server.process.terminate()
        assert server.process.wait(HANG) == 0
        assert len(pids) == 2
        assert server.children(ENGINE) == []


def test_who_waits_for_a_model_is_told_when_the_server_ends(tmp_path: Path) -> None:
    with serving(tmp_path, "--keep-alive", "5m") as server, ThreadPoolExecutor(1) as threads:
        url, body = f"{server.url}/v1/completions", {"model": CODE, "prompt": "x"}
        waiting = threads.submit(httpx.post, url, json=body, timeout=HANG)
        until(lambda: len(server.children(ENGINE)) == 1)
        server.process.terminate()
        assert waiting.result().json()["error"]["code"] == "shutting_down"
        assert server.process.wait(HANG) == 0
        assert server.children(ENGINE) == []


def test_a_second_signal_ends_what_loads(tmp_path: Path) -> None:
    with serving(tmp_path, "--keep-alive", "5m") as server, ThreadPoolExecutor(1) as threads:
        url, body = f"{server.url}/v1/completions", {"model": CODE, "prompt": "x"}
        waiting = threads.submit(httpx.post, url, json=body, timeout=HANG)
        until(lambda: len(server.children(ENGINE)) == 1)
        (pid,) = server.children(ENGINE)
        os.kill(pid, signal.SIGSTOP)  # it does not end by itself
        server.process.terminate()
        until(lambda: "draining" in server.log.read_text())
        server.process.terminate()
        os.kill(pid, signal.SIGCONT)
        assert server.process.wait(HANG) == 128 + signal.SIGTERM
        wait_until_gone(pid)
        waiting.exception()
