"""Which requests belong together, those of a tenant that begin alike, and where they go."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json

_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
# What the text to continue begins with, in the order in which templates put it.
_BEGINNINGS = ("instructions", "messages", "prompt", "input")
# Of a longer body the start is read, so that no body, however large, keeps other requests waiting.
_READ_BYTES = 64 << 10


def affinity_key(
    path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, num_characters: int
) -> str | None:
    """Equal for requests that may share cached prompts and histories: of one API key and cache salt, and
    with the same first ``num_characters`` of their texts; 0: of one key and salt. None where nothing is
    generated, or the body is for its reader to refuse."""
    if path not in _GENERATES:
        return None
    try:
        if len(body) > _READ_BYTES:
            start = body[:_READ_BYTES].decode(errors="ignore")
            fields = from_json(start, allow_partial="trailing-strings")
        else:
            fields = from_json(body)
    except ValueError:
        return None
    if not isinstance(fields, Mapping):
        return None
    found = hashlib.blake2b(digest_size=16)
    key = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    beginning = "".join(_leading([fields.get(name) for name in _BEGINNINGS], num_characters))
    parts = (key, str(fields.get("cache_salt", "")).encode(errors="replace"))
    for part in (*parts, beginning.encode(errors="replace")):
        found.update(hashlib.blake2b(part).digest())
    return found.hexdigest()


def home(key: str, replicas: Iterable[str]) -> str:
    """The replica that the key belongs to, however busy: the first of its own order."""
    return min(replicas, key=lambda each: _place(key, each))


def preferred(
    key: str | None,
    loads: Mapping[str, int],
    avoid: Collection[str] = (),
    *,
    load_factor: float = 1.5,
    free_requests: int = 8,
) -> list[str]:
    """The replicas in the order in which to try them. ``loads``: their open requests.

    With a key it is the key's own order, in which a replica that comes or goes moves no other (rendezvous
    hashing); those that have ``free_requests`` or more, and over ``load_factor`` times the mean, come
    after the rest, and those to ``avoid`` last. Without one the idle come first.
    """
    most = max(free_requests, math.ceil(load_factor * (sum(loads.values()) + 1) / len(loads)))

    def rank(replica: str) -> tuple[bool, bool, int, str]:
        load = loads[replica]
        if key is None:
            return replica in avoid, False, load, replica
        is_full = load >= most
        return replica in avoid, is_full, load if is_full else 0, _place(key, replica)

    return sorted(loads, key=rank)


def _place(key: str, replica: str) -> str:
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).hexdigest()


def _leading(value: Any, num_characters: int) -> Iterator[str]:
    """The texts within ``value``, and its numbers as texts, up to so many characters."""
    waiting = [value]
    left = num_characters
    while waiting and left > 0:
        value = waiting.pop()
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list):
            # No more items than there is room for can count.
            waiting += reversed(value[:num_characters])
        elif value is not None:
            text = f"{value} "[:left]
            left -= len(text)
            yield text
