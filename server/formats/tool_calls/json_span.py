"""Finds where a JSON object or array ends, in pieces as they come."""

from __future__ import annotations

import json
import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonSpan:
    """Counts brackets outside strings; what is between them is not judged."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False

    def feed(self, text: str) -> int:
        """How many characters of ``text`` belong to the value: all, unless it ends among them."""
        at = 0
        while at < len(text) and not self.ended:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return len(text)
            self._take(match[0])
            at = match.end()
        return at

    def _take(self, char: str) -> None:
        if char == '"':
            self._in_string = not self._in_string
        elif char == "\\":
            self._escaped = True
        elif char in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.ended = self._depth == 0


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of the calls that a JSON value holds; None where it holds others."""
    try:
        value = json.loads(text)
        calls = [_read_call(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return calls or None


def _read_call(value: dict[str, object]) -> tuple[str, str]:
    """Raises ValueError, TypeError or KeyError where it is none."""
    function = value.get("function") if isinstance(value, dict) else None
    call = function if isinstance(function, dict) else value
    if not isinstance(call, dict) or not isinstance(call["name"], str) or not call["name"]:
        raise TypeError("no call")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        # Some models write their arguments as JSON in JSON.
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("no arguments")
    return call["name"], json.dumps(arguments, ensure_ascii=False)
