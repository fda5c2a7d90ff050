"""``slipstream warm``: fills a fresh server from a log of finished requests.

Each line is sent as a prompt that already contains its completion, with one more token to generate: the
server caches the text, and its drafter keeps it for later requests with the same key and salt, as it
does with every request that ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.client.connection import Connection, patiently, side_by_side
from slipstream.client.errors import FlagError, RefusedError
from slipstream.client.session import NOT_SLIPSTREAM, connect, discover

FIELDS = ("prompt", "messages", "completion", "cache_salt")


@dataclass(frozen=True, slots=True)
class Lesson:
    """A line of the log as a request. ``number``: of the line."""

    number: int
    path: str
    fields: Mapping[str, Any]


def read_lessons(path: Path, last: int) -> list[Lesson]:
    """Returns the log's last lessons, empty lines aside. Raises FlagError, which names the line."""
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"cannot read {path}: {error}") from error
    numbered = [(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not numbered:
        raise FlagError(f"{path} has no lines")
    return [_lesson(number, text) for number, text in numbered[-last:]]


def _lesson(number: int, text: str) -> Lesson:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise FlagError(f"line {number}: not JSON: {error.msg}") from error
    if not isinstance(line, dict):
        raise FlagError(f"line {number}: not an object")
    if unknown := sorted(set(line) - set(FIELDS)):
        known = ", ".join(FIELDS)
        raise FlagError(f"line {number}: unknown field {unknown[0]!r} (known: {known})")
    salt = line.get("cache_salt", "")
    if not isinstance(salt, str):
        raise FlagError(f"line {number}: cache_salt must be a string")
    salted = {"cache_salt": salt} if salt else {}
    if ("messages" in line) == ("prompt" in line):
        raise FlagError(f"line {number}: give either prompt or messages")
    completion = line.get("completion")
    if "messages" in line:
        return Lesson(number, "/v1/chat/completions", salted | _chat(number, line, completion))
    prompt = line["prompt"]
    if type(prompt) is not type(completion) or not isinstance(prompt, str | list) or not completion:
        raise FlagError(f"line {number}: prompt and completion must both be texts, or token ids")
    return Lesson(number, "/v1/completions", salted | {"prompt": prompt + completion})


def _chat(number: int, line: Mapping[str, Any], completion: Any) -> dict[str, Any]:
    messages = line["messages"]
    if not isinstance(messages, list) or not isinstance(completion, str) or not completion:
        raise FlagError(f"line {number}: messages must be a list, and completion then a text")
    return {
        "messages": [*messages, {"role": "assistant", "content": completion}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def run(arguments: Namespace) -> int:
    """0 if the server took every line."""
    lessons = read_lessons(arguments.log, arguments.last)
    refused = asyncio.run(_teach(arguments, lessons))
    num_taught = len(lessons) - refused.total()
    sys.stdout.write(f"taught {num_taught} of {len(lessons)} requests\n")
    for reason, count in refused.most_common(5):
        sys.stderr.write(f"slipstream: {count} not taken: {reason}\n")
    return int(bool(refused))


async def _teach(arguments: Namespace, lessons: Sequence[Lesson]) -> Counter[str]:
    """Returns how many lines were refused, by reason."""
    refused: Counter[str] = Counter()
    async with connect(arguments) as connection:
        service = await discover(connection, arguments.model)
        if not service.tells_drafts:
            raise FlagError(NOT_SLIPSTREAM)
        options = {"draft_strategy": arguments.drafter}

        async def teach(lesson: Lesson) -> None:
            fields = {"max_tokens": 1, "temperature": 0, "speculative": options, **lesson.fields}
            send = partial(_send, connection, lesson.path, service.body(fields))
            try:
                await patiently(send)
            except RefusedError as error:
                refused[f"line {lesson.number}: {error}" if not error.is_busy else str(error)] += 1

        # Each takes the next line, so that the newest text is learnt last.
        await side_by_side(arguments.concurrency, (partial(teach, each) for each in lessons))
    return refused


async def _send(connection: Connection, path: str, body: Mapping[str, Any]) -> None:
    """Raises ClientError: RefusedError where the server does not take it."""
    async with aclosing(connection.stream(path, body)) as pieces:
        async for _ in pieces:
            pass
