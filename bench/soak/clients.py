"""Clients, those who behave and those who do not, and what each was told."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.raw_client import request
from bench.soak.server import FAULTY, Server

PROMPTS = (
    "def load(path):\n",
    "Repeat: the quick brown fox jumps over the lazy dog. The quick brown fox",
    "import os\nimport sys\n\n\ndef main():\n",
    '{"name": "example", "values": [1, 2, 3], "name": "example", "values": [1, 2',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)
NUM_SEEDS = 4
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
    "additionalProperties": False,
}
HOSTILE: tuple[bytes, ...] = (
    b"{",
    b"\xff\xfe{}",
    b'{"prompt": "\\ud83d"}',
    b'{"prompt": ' + b"[" * 20_000,
    b'{"prompt": [' + b"1," * 200_000 + b"1]}",
    b'{"prompt": "' + b"x" * (4 << 20) + b'"}',
    json.dumps({"prompt": "x", "max_tokens": -1}).encode(),
    json.dumps({"prompt": "x", "logit_bias": {"a": 1}}).encode(),
    json.dumps({"prompt": "x", "structured_outputs": {"regex": "("}}).encode(),
)
_REFUSED = {429: "refused", 503: "refused"}


@dataclass(slots=True)
class Told:
    """One client's result. ``outcome``: complete, refused (429, 503), failed (an error as documented),
    rejected (a hostile body's 4xx), left (the client went), cut off (a client that never read), or lost:
    anything else. ``key`` names the text that a complete reply has to have."""

    kind: str
    outcome: str
    seconds: float
    text: str = ""
    key: str = ""
    detail: str = ""


@dataclass
class Crowd:
    """Makes requests of all kinds against a server, and keeps what they were told."""

    server: Server
    client: httpx.AsyncClient
    max_tokens: int
    rng: random.Random
    told: list[Told] = field(default_factory=list)

    def body(self, rng: random.Random, **changes: Any) -> tuple[dict[str, Any], str]:
        """A request whose text hangs on its key alone, whoever drafts."""
        prompt, seed = rng.randrange(len(PROMPTS)), rng.randrange(NUM_SEEDS)
        temperature = seed % 2 * 0.7
        drafter = rng.choice(["ngram", "suffix", "none", "auto", "nasd", "grammar"])
        body: dict[str, Any] = {
            "prompt": PROMPTS[prompt],
            "seed": seed,
            "temperature": temperature,
            "max_tokens": self.max_tokens,
        }
        key = f"{prompt} {seed}"
        if drafter == "grammar":
            body["structured_outputs"] = {"json": SCHEMA}
            key += " grammar"
        body["speculative"] = {"draft_strategy": drafter}
        return body | changes, key

    async def run_one(self) -> None:
        """A client of a kind drawn by weight."""
        kinds: dict[str, int] = {"whole": 30, "stream": 35, "left": 10, "faulty": 10}
        kinds |= {"hostile": 10, "stalled": 5}
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        rng = random.Random(self.rng.random())
        run: Callable[[random.Random], Coroutine[Any, Any, Told]] = getattr(self, kind)
        start = time.monotonic()
        try:
            told = await run(rng)
        except (httpx.HTTPError, OSError, ValueError) as error:
            told = Told(kind, "lost", 0.0, detail=repr(error)[:200])
        told.seconds = time.monotonic() - start
        self.told.append(told)

    async def whole(self, rng: random.Random, kind: str = "whole", **changes: Any) -> Told:
        """A reply in one piece."""
        body, key = self.body(rng)
        reply = await self.client.post(f"{self.server.url}/v1/completions", json=body | changes)
        if reply.status_code == 200:
            return Told(kind, "complete", 0, reply.json()["choices"][0]["text"], key)
        return refusal(kind, reply.status_code, reply.text)

    async def faulty(self, rng: random.Random) -> Told:
        """Drafts by a drafter that breaks: the text is the same all the same."""
        return await self.whole(rng, "faulty", speculative={"draft_strategy": FAULTY})

    async def stream(self, rng: random.Random, num_events: int = 1 << 30) -> Told:
        """A reply in pieces, of which so many are read."""
        kind = "stream" if num_events > 1 << 20 else "left"
        body, key = self.body(rng, stream=True)
        pieces: list[str] = []
        async with self.client.stream(
            "POST", f"{self.server.url}/v1/completions", json=body
        ) as reply:
            if reply.status_code != 200:
                return refusal(kind, reply.status_code, (await reply.aread()).decode())
            error = ""
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    if error:
                        return Told(kind, "failed", 0, detail=error)
                    return Told(kind, "complete", 0, "".join(pieces), key)
                if not line.startswith("data: "):
                    continue
                event = json.loads(data)
                if "error" in event:
                    error = str(event["error"]["code"])
                    continue
                pieces += [choice["text"] for choice in event["choices"]]
                num_events -= 1
                if num_events <= 0:
                    return Told("left", "left", 0)
        return Told(kind, "lost", 0, detail="the stream broke off")

    async def left(self, rng: random.Random) -> Told:
        """Hangs up soon."""
        return await self.stream(rng, rng.randint(1, 5))

    async def hostile(self, rng: random.Random) -> Told:
        """Sends what is no request."""
        content = rng.choice(HOSTILE)
        headers = {"content-type": "application/json"}
        reply = await self.client.post(
            f"{self.server.url}/v1/completions", content=content, headers=headers
        )
        if reply.status_code in (400, 408, 413):
            return Told("hostile", "rejected", 0)
        return refusal("hostile", reply.status_code, reply.text)

    async def stalled(self, rng: random.Random) -> Told:
        """Asks for many streams in one, and reads nothing until the server has ended it."""
        body, _ = self.body(rng, stream=True, n=4, logprobs=20)
        asked = request(f"{self.server.url}/v1/completions", json.dumps(body).encode())
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await loop.sock_connect(raw, (self.server.host, self.server.port))
            await loop.sock_sendall(raw, asked)
            await asyncio.sleep(30)
        return Told("stalled", "cut off", 0)


def refusal(kind: str, status: int, text: str) -> Told:
    """Classifies an answer other than 200."""
    try:
        code = str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return Told(kind, "lost", 0, detail=f"{status} {text[:200]}")
    outcome = _REFUSED.get(status, "lost")
    return Told(kind, outcome, 0, detail=f"{status} {code}")
