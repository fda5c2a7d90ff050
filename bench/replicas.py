"""Compares replicas behind one address with one server, and measures what affinity gains.

    python -m bench.replicas equal ONE MANY [--requests 500] [--at-once 16]
    python -m bench.replicas affinity MANY [--at-once 8]

ONE and MANY are addresses of servers with the same model and settings. ``equal`` sends a mix of requests
(whole and streamed, greedy and sampled, drafters, several choices, chats, schemas) to both, and ends with
1 where a text differs or a request fails. ``affinity`` sends prompts that begin alike with one API key,
and the same again with a key made up for each request, so that nothing keeps them together; the servers
must know no keys. Each half has a cache salt of its own, and their requests take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

_CODE = Path(__file__).resolve().parent / "data" / "heldout_code.jsonl"
_SECONDS = 600.0
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["load", "save"]}, "depth": {"type": "integer"}},
    "required": ["name", "depth"],
    "additionalProperties": False,
}
# Those that the bundled model has, but for "grammar", which goes along with schemas.
_DRAFTERS = ("none", "ngram", "suffix", "prediction", "nasd", "nasd_one_level", "stand", "recycling",
             "auto", "jacobi", "lookahead", "small_model", "medusa")  # fmt: skip


class Asked(NamedTuple):
    """A request: where to, and its body."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """``texts``: of the choices, by index, as far as they were written; ``error``: the code of what came
    instead of the rest; ``usage``: of the reply."""

    texts: tuple[str, ...]
    error: str | None
    usage: dict[str, Any]


def documents() -> list[str]:
    """Code that the bundled model was not trained on."""
    lines = _CODE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def mixed_requests(count: int, max_tokens: int = 48) -> list[Asked]:
    """The same for the same ``count``. Every one has a seed."""
    chosen = random.Random(count)
    texts = documents()
    found = []
    for number in range(count):
        text = chosen.choice(texts)
        start = chosen.randrange(max(1, len(text) - 400))
        prompt = text[start : start + chosen.randrange(20, 400)]
        body: dict[str, Any] = {
            "seed": number,
            "temperature": chosen.choice([0, 0.7, 1.0]),
            "stream": chosen.random() < 0.5,
            "speculative": {"draft_strategy": chosen.choice(_DRAFTERS)},
        }
        if body["speculative"]["draft_strategy"] == "prediction":
            body["prediction"] = {"type": "content", "content": text}
        if chosen.random() < 0.2:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "call", "schema": _SCHEMA},
            }
        if chosen.random() < 0.2:
            body["stop"] = ["\n\n", "return"]
        kind = chosen.random()
        if kind < 0.6:
            body |= {"prompt": prompt, "n": chosen.choice([1, 1, 1, 3]), "max_tokens": max_tokens}
            found.append(Asked("/v1/completions", body))
        else:
            messages = [{"role": "user", "content": prompt}]
            body |= {"messages": messages, "max_completion_tokens": max_tokens}
            found.append(Asked("/v1/chat/completions", body))
    return found


async def ask(client: httpx.AsyncClient, asked: Asked, key: str = "") -> Answer:
    """Send it, and read the answer to whatever end."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "slipstream-bundled", **asked.body}
    if asked.body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    try:
        async with client.stream("POST", asked.path, json=body, headers=headers) as reply:
            content = (await reply.aread()).decode()
    except httpx.TransportError as error:
        return Answer((), type(error).__name__, {})
    events = (
        [json.loads(content)]
        if not body.get("stream") or reply.status_code != 200
        else [
            json.loads(each.removeprefix("data: "))
            for each in content.split("\n\n")
            if each.startswith("data: {")
        ]
    )
    return _answer(events)


def _answer(events: Sequence[dict[str, Any]]) -> Answer:
    texts: dict[int, str] = {}
    error, usage = None, {}
    for event in events:
        if "error" in event:
            error = event["error"]["code"]
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("content") or "")
    return Answer(tuple(texts[index] for index in sorted(texts)), error, usage)


async def ask_all(
    url: str, requests: Sequence[Asked], at_once: int, keys: Sequence[str] = ()
) -> list[Answer]:
    """The answers, in the order of the requests, of which so many are open at a time."""
    free = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=_SECONDS, limits=limits) as client:

        async def one(number: int) -> Answer:
            async with free:
                return await ask(client, requests[number], keys[number] if keys else "")

        return list(await asyncio.gather(*map(one, range(len(requests)))))


def _compare(one: str, many: str, count: int, at_once: int) -> int:
    requests = mixed_requests(count)
    expected = asyncio.run(ask_all(one, requests, at_once))
    found = asyncio.run(ask_all(many, requests, at_once))
    errors = Counter(each.error for each in (*expected, *found) if each.error)
    pairs = zip(expected, found, strict=True)
    num_equal = sum(left.texts == right.texts and bool(left.texts) for left, right in pairs)
    sys.stdout.write(f"{num_equal} of {count} equal; errors: {dict(errors)}\n")
    return int(num_equal < count or bool(errors))


def _gain(many: str, at_once: int) -> int:
    """Each of 24 beginnings comes eight times, with a little of its own at the end."""
    chosen = random.Random(1)
    texts = documents()
    beginnings = ["\n".join(chosen.sample(texts, 3)) for _ in range(24)]
    halves: dict[str, list[Answer]] = {"with affinity": [], "without": []}
    for turn in range(8):
        for name, answers in halves.items():
            requests = []
            for number, beginning in enumerate(beginnings):
                body = {
                    "prompt": f"{beginning}\n# version {turn}\ndef ",
                    "max_tokens": 64,
                    "temperature": 0.3,
                    "seed": turn * 100 + number,
                    "cache_salt": name,
                    "ignore_eos": True,
                    "speculative": {"draft_strategy": "suffix", "adaptive_depth": "fixed"},
                }
                requests.append(Asked("/v1/completions", body))
            is_kept = name == "with affinity"
            keys = ["" if is_kept else f"{turn}-{number}" for number in range(len(requests))]
            answers += asyncio.run(ask_all(many, requests, at_once, keys))
    for name, answers in halves.items():
        sys.stdout.write(f"{name:14} {_figures(answers)}\n")
    failed = [each.error for answers in halves.values() for each in answers if each.error]
    return int(bool(failed))


def _figures(answers: Sequence[Answer]) -> str:
    usages = [each.usage for each in answers if each.usage]
    prompt = sum(each["prompt_tokens"] for each in usages)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    written = sum(each["completion_tokens"] for each in usages)
    drafted = sum(each["speculative"]["num_draft_tokens"] for each in usages)
    accepted = sum(each["speculative"]["num_accepted_tokens"] for each in usages)
    steps = sum(each["speculative"]["num_steps"] for each in usages)
    return (
        f"prefix hits {cached / max(1, prompt):.1%} of {prompt} tokens; suffix: {accepted} of "
        f"{drafted} drafts accepted, {written / max(1, steps):.2f} tokens per step ({written} tokens)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    equal = commands.add_parser("equal")
    equal.add_argument("one")
    equal.add_argument("many")
    equal.add_argument("--requests", type=int, default=500)
    equal.add_argument("--at-once", type=int, default=16)
    affinity = commands.add_parser("affinity")
    affinity.add_argument("many")
    affinity.add_argument("--at-once", type=int, default=8)
    given = parser.parse_args()
    if given.command == "equal":
        return _compare(given.one, given.many, given.requests, given.at_once)
    return _gain(given.many, given.at_once)


if __name__ == "__main__":
    sys.exit(main())
