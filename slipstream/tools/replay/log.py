"""Logs to replay: one JSON object per line, a prompt and what was written after it.

Refused is what cannot be replayed as it stands, by line number and field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_FIELDS = ("prompt", "messages", "completion", "cache_salt")
_MAX_TOKEN_ID = 2**24 - 2
"""The largest id that fits into the drafters' packed contexts."""


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that logs need."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class LogLine:
    """One request as it ran. ``cache_salt`` names its tenant."""

    number: int
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    cache_salt: str = ""


class LogError(ValueError):
    """A line that cannot be replayed; the message names line and field."""


def read_log(
    path: Path, load_tokenizer: Callable[[], Tokenizer], ignored: Iterable[str] = ()
) -> list[LogLine]:
    """All lines of the log; ``load_tokenizer`` is called once, where one of them has text.

    ``prompt`` (or ``messages``, through the model's chat template) and ``completion`` are text or
    token ids; ``cache_salt`` may name a tenant; fields in ``ignored`` are not read. Empty lines are
    skipped. Raises LogError for lines that do not fit, OSError for a file that cannot be read.
    """
    reader = _Reader(load_tokenizer, frozenset(ignored))
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise LogError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    lines = [reader.line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise LogError(f"{path} has no lines")
    return lines


def json_object(number: int, text: str) -> dict[str, Any]:
    """Returns a line's object. Raises LogError, which names the line by its ``number``, if it is not an
    object."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise LogError(f"line {number}: not JSON: {error.msg}") from error
    if not isinstance(fields, dict):
        raise LogError(f"line {number}: not an object")
    return fields


class _Reader:
    def __init__(self, load_tokenizer: Callable[[], Tokenizer], ignored: frozenset[str]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._ignored = ignored

    def line(self, number: int, text: str) -> LogLine:
        fields = json_object(number, text)
        for name in fields:
            if name not in _FIELDS and name not in self._ignored:
                raise LogError(
                    f"line {number}: unknown field {name!r} (known: {', '.join(_FIELDS)}; "
                    f"--ignore-fields {name} to leave it out)"
                )
        cache_salt = fields.get("cache_salt", "")
        if not isinstance(cache_salt, str):
            raise LogError(f"line {number}: cache_salt must be a string")
        completion = self._token_ids(number, "completion", fields)
        if not completion:
            raise LogError(f"line {number}: completion is empty")
        return LogLine(number, self._prompt(number, fields), completion, cache_salt)

    def _prompt(self, number: int, fields: dict[str, Any]) -> Sequence[int]:
        if "messages" not in fields:
            token_ids = self._token_ids(number, "prompt", fields, with_special_tokens=True)
            if not token_ids:
                raise LogError(f"line {number}: prompt is empty")
            return token_ids
        if "prompt" in fields:
            raise LogError(f"line {number}: messages and prompt exclude each other")
        try:
            text = self._tokenize_with().apply_chat_template(
                fields["messages"], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever Jinja and their authors please
            raise LogError(f"line {number}: messages: {error}") from error
        return self._encode(number, "messages", text, False)

    def _token_ids(
        self, number: int, name: str, fields: dict[str, Any], with_special_tokens: bool = False
    ) -> Sequence[int]:
        if name not in fields:
            raise LogError(f"line {number}: {name} is missing")
        value = fields[name]
        if isinstance(value, str):
            return self._encode(number, name, value, with_special_tokens)
        if not isinstance(value, list):
            raise LogError(f"line {number}: {name} must be text or a list of token ids")
        for index, each in enumerate(value):
            if type(each) is not int or not 0 <= each <= _MAX_TOKEN_ID:
                raise LogError(f"line {number}: {name}[{index}] is not a token id")
        return value

    def _encode(self, number: int, name: str, text: str, with_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LogError(f"line {number}: {name} has halves of characters") from error
        # Not verbose: a text longer than the model's context is no matter here.
        return list(
            self._tokenize_with().encode(
                text, add_special_tokens=with_special_tokens, verbose=False
            )
        )

    def _tokenize_with(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer
