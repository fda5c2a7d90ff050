"""Which requests belong together: those of a tenant that begin alike. Where they go is said in
``slipstream/tools/simulate/affinity.py``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json

_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
# What the text to continue begins with, in the order in which templates put it.
_BEGINNINGS = ("instructions", "system", "messages", "prompt", "input")
# Of a longer body the start is read, so that no body, however large, keeps other requests waiting.
_READ_BYTES = 64 << 10
_TEXT_VALUE = re.compile(rb'\s*:\s*"([^"\\]{1,1024})"')


def affinity_key(
    path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, num_characters: int
) -> str | None:
    """Equal for requests that may share cached prompts and histories: of one API key and cache salt, and
    with one ``prompt_cache_key``, or else the same first ``num_characters`` of their texts; 0: of one key
    and salt. None where nothing is generated, or the body is for its reader to refuse."""
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
    given = {name.lower(): value for name, value in headers}
    key = given.get(b"authorization") or given.get(b"x-api-key", b"")
    group = _said("prompt_cache_key", fields, body)
    if group is None:
        texts = [fields.get(name) for name in _BEGINNINGS]
        group = "".join(_leading(texts, num_characters))
        kind = b"text"
    else:
        kind = b"named"
    salt = _said("cache_salt", fields, body) or ""
    for part in (key, salt.encode(errors="replace"), kind, group.encode(errors="replace")):
        found.update(hashlib.blake2b(part).digest())
    return found.hexdigest()


def _said(name: str, fields: Mapping[str, Any], body: bytes) -> str | None:
    """A field's text, also where it comes after the part of a long body that was read: agents send it
    after a conversation, and that grows. A name within a text has escaped quotes, so it is not found."""
    value = fields.get(name)
    if value is None and len(body) > _READ_BYTES:
        at = body.rfind(b'"%b"' % name.encode())
        said = _TEXT_VALUE.match(body, at + len(name) + 2) if at >= 0 else None
        value = said[1].decode(errors="replace") if said else None
    return value if isinstance(value, str) and value else None


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
