"""Runs the soak, prints what came of it, and ends with 1 where a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from bench.soak.clients import NUM_SEEDS, PROMPTS, SCHEMA, Crowd, Told
from bench.soak.server import Server, serving

_SAMPLE_SECONDS = 5.0
_IDLE_SECONDS = 120.0
_GROWTH = 1.15
"""Memory may grow so much from the first to the last quarter: allocators keep what they once had."""


@dataclass
class Sample:
    """The server at a moment. ``waiting``: requests in the queue."""

    at: float
    resident_bytes: int
    waiting: float


@dataclass
class Figures:
    """The figures of a soak."""

    seconds: float
    capacity: float
    rate: float
    told: list[Told]
    samples: list[Sample]
    num_kills: int
    blocks: dict[str, float]
    total_blocks: float
    num_different: int
    limits: dict[str, float] = field(default_factory=dict)

    def p99(self) -> float:
        """Seconds of complete replies."""
        seconds = sorted(each.seconds for each in self.told if each.outcome == "complete")
        return seconds[int(0.99 * (len(seconds) - 1))] if seconds else 0.0

    def growth(self) -> float:
        """Memory in the last quarter over that in the second: the first is the start."""
        quarter = max(1, len(self.samples) // 4)
        early = mean(each.resident_bytes for each in self.samples[quarter : 2 * quarter])
        return mean(each.resident_bytes for each in self.samples[-quarter:]) / early

    def broken(self) -> list[str]:
        """The promises that did not hold."""
        lost = [each for each in self.told if each.outcome == "lost"]
        held = self.blocks.get("free", 0) + self.blocks.get("cached", 0)
        most = max(each.waiting for each in self.samples)
        checks = {
            f"{len(lost)} replies lost: {Counter(each.detail for each in lost).most_common(3)}": lost,
            f"{self.num_different} texts differ": self.num_different,
            f"{self.total_blocks - held:.0f} blocks leaked": held != self.total_blocks,
            f"memory grew {self.growth():.2f}x": self.growth() > _GROWTH,
            f"{most:.0f} waited": most > self.limits["queue"],
            f"p99 is {self.p99():.1f} s": self.p99() > self.limits["deadline"],
        }
        return [said for said, is_broken in checks.items() if is_broken]

    def report(self) -> str:
        """For people."""
        kinds = sorted({each.kind for each in self.told})
        outcomes = Counter((each.kind, each.outcome) for each in self.told)
        lines = [
            f"{len(self.told)} requests in {self.seconds / 60:.1f} min at {self.rate:.1f}/s, twice what "
            f"was served at first; the engine killed {self.num_kills} times",
            *(f"- {kind}: {_listed(outcomes, kind)}" for kind in kinds),
            f"p99 of complete replies {self.p99():.1f} s, most in the queue "
            f"{max(each.waiting for each in self.samples):.0f}, memory {self.growth():.2f}x, blocks "
            f"{self.blocks}, of {self.total_blocks:.0f}",
            f"errors told: {Counter(each.detail for each in self.told if each.detail)}",
        ]
        return "\n".join(lines)


def _listed(outcomes: Counter[tuple[str, str]], kind: str) -> str:
    of_kind = sorted((outcome, count) for (of, outcome), count in outcomes.items() if of == kind)
    return ", ".join(f"{count} {outcome}" for outcome, count in of_kind)


async def soak(server: Server, options: argparse.Namespace) -> Figures:
    """Load, kills and the account."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=options.deadline + 60, limits=limits) as client:
        crowd = Crowd(server, client, options.max_tokens, random.Random(options.seed))
        texts = await _texts(crowd)
        capacity = await _capacity(crowd, options)
        crowd.told.clear()
        samples: list[Sample] = []
        start = time.monotonic()
        sampling = asyncio.ensure_future(_sample(server, client, samples))
        num_kills = await _load(crowd, 2 * capacity, options, start)
        seconds = time.monotonic() - start
        await _until_idle(server, client)
        sampling.cancel()
        figures = await _metrics(server, client)
    different = [
        each for each in crowd.told if each.outcome == "complete" and each.text != texts[each.key]
    ]
    return Figures(
        seconds,
        capacity,
        2 * capacity,
        crowd.told,
        samples,
        num_kills,
        figures["blocks"],
        figures["total"],
        len(different),
        {"queue": options.queue, "deadline": options.deadline},
    )


async def _texts(crowd: Crowd) -> dict[str, str]:
    """Every text that there is, by its key, without drafts and one at a time."""
    texts = {}
    for prompt in range(len(PROMPTS)):
        for seed in range(NUM_SEEDS):
            for suffix in ("", " grammar"):
                body: dict[str, Any] = {
                    "prompt": PROMPTS[prompt],
                    "seed": seed,
                    "temperature": seed % 2 * 0.7,
                    "max_tokens": crowd.max_tokens,
                    "speculative": {"draft_strategy": "none"},
                }
                if suffix:
                    body["structured_outputs"] = {"json": SCHEMA}
                reply = await crowd.client.post(f"{crowd.server.url}/v1/completions", json=body)
                texts[f"{prompt} {seed}{suffix}"] = reply.json()["choices"][0]["text"]
    return texts


async def _capacity(crowd: Crowd, options: argparse.Namespace) -> float:
    """Requests per second that a closed crowd gets through."""
    end = time.monotonic() + options.warm_up

    async def one_after_the_other() -> None:
        while time.monotonic() < end:
            crowd.told.append(await crowd.whole(crowd.rng))

    start = time.monotonic()
    await asyncio.gather(*(one_after_the_other() for _ in range(options.seqs)))
    return len(crowd.told) / (time.monotonic() - start)


async def _load(crowd: Crowd, rate: float, options: argparse.Namespace, start: float) -> int:
    """Clients at random times until the end, and the kills; returns how many of those."""
    end = start + 60 * options.minutes
    kills = [start + (end - start) * share for share in (1 / 3, 2 / 3)]
    running: set[asyncio.Task[None]] = set()
    num_kills = 0
    while time.monotonic() < end:
        await asyncio.sleep(crowd.rng.expovariate(rate))
        task = asyncio.ensure_future(crowd.run_one())
        running.add(task)
        task.add_done_callback(running.discard)
        if num_kills < len(kills) and time.monotonic() > kills[num_kills]:
            crowd.server.kill_engine()
            num_kills += 1
    await asyncio.gather(*running)
    return num_kills


async def _sample(server: Server, client: httpx.AsyncClient, samples: list[Sample]) -> None:
    start = time.monotonic()
    while True:
        figures = await _metrics(server, client)
        at = time.monotonic() - start
        samples.append(Sample(at, server.resident_bytes(), figures["waiting"]))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _until_idle(server: Server, client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < deadline:
        figures = await _metrics(server, client)
        if figures["running"] == figures["waiting"] == 0:
            return
        await asyncio.sleep(1)


async def _metrics(server: Server, client: httpx.AsyncClient) -> dict[str, Any]:
    text = (await client.get(f"{server.url}/metrics")).text
    blocks = {
        state: float(value)
        for state, value in re.findall(r'^slipstream_kv_blocks\{state="(\w+)"\} (\S+)', text, re.M)
    }
    figures: dict[str, Any] = {"blocks": blocks}
    for name, metric in (
        ("total", "kv_blocks_total"),
        ("running", "requests_running"),
        ("waiting", "requests_waiting"),
    ):
        found = re.search(rf"^slipstream_{metric} (\S+)", text, re.M)
        figures[name] = float(found[1]) if found else 0.0
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds to measure capacity")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seqs", type=int, default=16, help="requests in the batch at most")
    parser.add_argument("--queue", type=int, default=32, help="requests that may wait")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for a reply")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    flags = {
        "max-num-seqs": str(options.seqs),
        "max-num-waiting": str(options.queue),
        "write-timeout": "5",
        "read-timeout": "10",
        "restart-engine": "",
        "max-body-bytes": str(8 << 20),
    }
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), flags) as server:
        figures = asyncio.run(soak(server, options))
        log = server.log.read_text(errors="replace")
    sys.stdout.write(figures.report() + "\n")
    broken = figures.broken()
    for each in broken:
        sys.stdout.write(f"BROKEN: {each}\n")
    if options.output:
        options.output.write_text(
            json.dumps({"report": figures.report(), "broken": broken, "log": log})
        )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
