"""Conversations in files: one line of JSON, ``{"messages": [...]}``, which ``slipstream bench
--prompts`` reads too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from client.errors import FlagError

_KEYS = {"role", "content"}


def write_transcript(path: Path, messages: Sequence[dict[str, str]]) -> None:
    """Raises FlagError where ``path`` cannot be written."""
    try:
        path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    except OSError as error:
        raise FlagError(f"cannot write {path}: {error.strerror}") from error


def read_transcript(path: Path) -> list[dict[str, str]]:
    """Raises FlagError for what ``write_transcript`` has not written."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise TypeError
    except OSError as error:
        raise FlagError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FlagError(f"{path} holds no conversation saved by /save") from error
    return messages


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == _KEYS
        and all(isinstance(each, str) for each in value.values())
    )
