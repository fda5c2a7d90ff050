"""Sends random grammars to a server beside a stream, and tells what comes and how long the stream waits.

    scripts/fuzz-grammars URL [NUM [SEED]]

The stream is watched by a process of its own, and what sends grammars leaves the processor to others, as
clients of other machines would. Ends with 1 at an answer that is neither a 200 nor a 400 with a field and
a reason.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from typing import Any

import httpx

from worlds.random_grammars import random_constraint, text_of

_CONCURRENT = 3
_TOKENS = 24
_CALM_SECONDS = 10.0


async def _watch(url: str, ended: Callable[[], bool]) -> list[float]:
    """Returns the seconds between two events of streams, until ``ended``."""
    body = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    body["speculative"] = {"draft_strategy": "none"}
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while not ended():
            before = None
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                async for _ in reply.aiter_lines():
                    now = time.perf_counter()
                    if before is not None:
                        gaps.append(now - before)
                    before = now
                    if ended():
                        break
    return gaps


def _flood(url: str, num: int, first: int) -> Counter[str]:
    """Returns how many answers there were of each kind."""
    os.nice(19)
    return asyncio.run(_send(url, num, first))


async def _send(url: str, num: int, first: int) -> Counter[str]:
    found: Counter[str] = Counter()
    seeds = count(first)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def work() -> None:
            while (seed := next(seeds)) < first + num:
                await _one(client, seed, found)

        await asyncio.gather(*(work() for _ in range(_CONCURRENT)))
    return found


async def _one(client: httpx.AsyncClient, seed: int, found: Counter[str]) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": _TOKENS, "temperature": 1, "seed": seed}
    constraint = random_constraint(seed)
    reply = await client.post("/v1/completions", json=asked | constraint)
    kind = str(reply.status_code)
    if reply.status_code == 200:
        (choice,) = reply.json()["choices"]
        kind += f" {choice['finish_reason']}"
    elif reply.status_code == 400 and not reply.json()["error"]["param"]:
        kind += " without a field"
    found[kind] += 1
    if kind not in ("200 stop", "200 length", "400"):
        print(f"seed {seed}: {kind}: {text_of(constraint)[:500]}: {reply.text[:500]}", flush=True)


def _say(name: str, gaps: list[float]) -> None:
    gaps.sort()
    num = len(gaps)
    print(
        f"{name}: {num} gaps, median {1e3 * gaps[num // 2]:.0f} ms, "
        f"0.999 {1e3 * gaps[int(num * 0.999)]:.0f} ms, longest {1e3 * gaps[-1]:.0f} ms",
        flush=True,
    )


def _run(url: str, num: int, first: int) -> int:
    until = time.perf_counter() + _CALM_SECONDS
    _say("calm", asyncio.run(_watch(url, lambda: time.perf_counter() > until)))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        flood: Future[Counter[str]] = pool.submit(_flood, url, num, first)
        _say("beside grammars", asyncio.run(_watch(url, flood.done)))
        found = flood.result()
    print(dict(found))
    return int(bool(set(found) - {"200 stop", "200 length", "400"}))


if __name__ == "__main__":
    address, *numbers = sys.argv[1:]
    num, first = [*map(int, numbers), 5000, 0][:2] if len(numbers) != 1 else (int(numbers[0]), 0)
    sys.exit(_run(address, num, first))
