"""Arrivals from a file: JSON lines with the time of each request, and its texts or only their lengths.

With ``completion`` a line is one of a log to replay (docs/replay.md), which the same reader reads. Else
``prompt_tokens`` and ``completion_tokens`` say how long both are, and ``prefix_tokens`` how much of the
prompt all of the tenant's of that kind begin with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.tools.replay.log import LogError, Tokenizer, json_object, read_log
from slipstream.tools.simulate.profile import Kind
from slipstream.tools.simulate.work import Work, own_tokens, prompt_tokens

_COUNTED = ("at", "kind", "cache_salt", "prompt_tokens", "completion_tokens", "prefix_tokens")
_MAX_TOKENS = 1 << 20


def read_trace(
    path: Path, kinds: Mapping[str, Kind], load_tokenizer: Callable[[], Tokenizer], seed: int = 0
) -> list[Work]:
    """All requests, in the order of the file, which is that of their times.

    ``at``: seconds from the begin. ``kind``: one of the profile's; may be left out where it has but
    one. ``cache_salt`` names the tenant. ``seed``: of what drafts hit. Raises LogError for lines that
    do not fit, by number and field, OSError.
    """
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise LogError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    lines = {
        number: json_object(number, text) for number, text in enumerate(texts, 1) if text.strip()
    }
    if not lines:
        raise LogError(f"{path} has no lines")
    reader = _Reader(kinds, seed)
    if not any("completion" in fields for fields in lines.values()):
        return [reader.counted(number, fields) for number, fields in lines.items()]
    log = read_log(path, load_tokenizer, ("at", "kind"))
    return [
        reader.work(
            each.number, lines[each.number], each.prompt_token_ids, each.completion_token_ids
        )
        for each in log
    ]


class _Reader:
    def __init__(self, kinds: Mapping[str, Kind], seed: int) -> None:
        self._kinds = kinds
        self._seed = seed
        self._shared: dict[tuple[str, str], int] = {}
        self._last = 0.0

    def counted(self, number: int, fields: dict[str, Any]) -> Work:
        for name in fields:
            if name not in _COUNTED:
                raise LogError(
                    f"line {number}: unknown field {name!r} (known: {', '.join(_COUNTED)})"
                )
        num_prompt = self._number(number, "prompt_tokens", fields, 1)
        num_answer = self._number(number, "completion_tokens", fields, 1)
        num_prefix = self._number(number, "prefix_tokens", {"prefix_tokens": 0} | fields, 0)
        if num_prefix >= num_prompt:
            raise LogError(f"line {number}: prefix_tokens must be below prompt_tokens")
        tenant_and_kind = (_salt(number, fields), self._kind(number, fields))
        shared = self._shared.setdefault(tenant_and_kind, len(self._shared))
        prompt = prompt_tokens(num_prompt, num_prefix, shared, number)
        return self.work(number, fields, prompt, own_tokens(number, num_prompt, num_answer))

    def work(
        self, number: int, fields: dict[str, Any], prompt: Sequence[int], completion: Sequence[int]
    ) -> Work:
        return Work(
            self._at(number, fields),
            self._kind(number, fields),
            _salt(number, fields),
            prompt,
            completion,
            seed=self._seed * 1_000_003 + number,
        )

    def _at(self, number: int, fields: dict[str, Any]) -> float:
        at = fields.get("at")
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
            raise LogError(f"line {number}: at must be seconds from 0")
        if at < self._last:
            raise LogError(f"line {number}: at is before the line above: {at:g} < {self._last:g}")
        self._last = float(at)
        return self._last

    def _kind(self, number: int, fields: dict[str, Any]) -> str:
        if "kind" not in fields and len(self._kinds) == 1:
            return next(iter(self._kinds))
        kind = fields.get("kind")
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join(self._kinds)
            raise LogError(f"line {number}: kind must be one of the profile's: {known}")
        return kind

    def _number(self, number: int, name: str, fields: dict[str, Any], least: int) -> int:
        value = fields.get(name)
        if type(value) is not int or not least <= value <= _MAX_TOKENS:
            raise LogError(f"line {number}: {name} must be a number from {least} to {_MAX_TOKENS}")
        return value


def _salt(number: int, fields: dict[str, Any]) -> str:
    salt = fields.get("cache_salt", "")
    if not isinstance(salt, str):
        raise LogError(f"line {number}: cache_salt must be a string")
    return salt
