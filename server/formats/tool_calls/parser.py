"""Takes tool calls out of a text that comes in pieces.

What is found does not depend on the pieces: with speculation their size is chance. Every decision is
taken at one character of the text, and until then the text waits. A call's arguments go out as they
come; text that began like a call and is none comes out as content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pydantic_core import from_json
from regex import compile

from server.formats.format import (
    SPACE,
    ArgumentsReader,
    CallSyntax,
    JsonArguments,
    Scanner,
    Schema,
    ToolCallFormat,
)
from server.formats.parts import CallArguments, CallStart, Content, Part

_JSON_START = compile(rf"{SPACE}[\[{{]")


class CallParser(Scanner[Part]):
    """Parses the text of one choice. ``functions``: those that may be called, and the schemas of their
    arguments. ``id_seed``: calls of different seeds have different ids."""

    def __init__(self, form: ToolCallFormat, functions: Mapping[str, Schema], id_seed: str) -> None:
        super().__init__(self._begin)
        self._form = form
        self._functions = functions
        self._id_seed = id_seed
        # White space that is content only if content follows.
        self._space = ""
        self._wrote_content = False
        # What opened the call that is being read: content, if it is none.
        self._opened = ""
        self._is_bare = False
        self._syntax: CallSyntax = form.syntaxes[0]
        self._reader: ArgumentsReader = JsonArguments({})
        # JSON that does not begin with a name, as far as it was read.
        self._value = ""
        self.num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._state == self._arguments

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the choice."""
        parts = super().finish()
        if self._space and not self.num_calls:
            parts.append(Content(self._space))
        return parts

    def _begin(self, final: bool) -> bool:
        found = self._form.bare and self._form.bare.match(self._buffer, partial=not final)
        if found and found.partial:
            return False
        self._state = self._content
        if found:
            self._open(self._take(found.end()), is_bare=True)
        return True

    def _content(self, final: bool) -> bool:
        text, found = self._until(self._form.opener, final)
        self._write(text)
        if found is None:
            return False
        self._open(found[0])
        return True

    def _open(self, opened: str, *, is_bare: bool = False) -> None:
        self._opened = opened
        self._is_bare = is_bare
        self._state = self._head

    def _head(self, final: bool) -> bool:
        may_come = False
        for syntax in self._form.syntaxes:
            found = syntax.head.match(self._buffer, partial=not final)
            if found and not found.partial:
                name = found["name"]
                if self._is_bare and name not in self._functions:
                    return self._reject()
                self._start(name)
                self._take(found.start("arguments"))
                self._syntax = syntax
                self._reader = syntax.reader(self._functions.get(name, {}))
                self._state = self._arguments
                return True
            may_come = may_come or found is not None
        if may_come:
            return False
        if self._is_bare or not _JSON_START.match(self._buffer):
            return self._reject()
        self._reader, self._value = JsonArguments({}), ""
        self._state = self._other_order
        return True

    def _arguments(self, final: bool) -> bool:
        if text := self._read(final):
            self._settled.append(CallArguments(self.num_calls - 1, text))
        self._state = self._tail if self._reader.ended else self._arguments
        return self._reader.ended

    def _read(self, final: bool) -> str:
        """Hands the text to the reader; what it does not take comes back when it has ended."""
        found = "".join(self._reader.feed(self._take(len(self._buffer)), final))
        if self._reader.ended:
            self._buffer = self._reader.rest
        return found

    def _tail(self, final: bool) -> bool:
        found = self._syntax.tail.match(self._buffer, partial=True)
        if found and found.partial:
            # The end of the text may come before the end of the call.
            self._buffer = "" if final else self._buffer
            return False
        self._state = self._content
        if found:
            self._take(found.end())
            self._state = self._following if self._syntax.following else self._content
        return True

    def _following(self, final: bool) -> bool:
        assert self._syntax.following is not None
        found = self._syntax.following.match(self._buffer, partial=not final)
        if found and found.partial:
            return False
        self._state = self._content
        if found and found["more"]:
            self._open(self._take(found.end()), is_bare=self._is_bare)
        elif found:
            self._take(found.end())
        return True

    def _other_order(self, final: bool) -> bool:
        """JSON that does not begin with a name is read when all of it is there."""
        if not self._reader.ended:
            self._value += self._read(final)
        if not self._reader.ended:
            return final and self._reject()
        found = self._form.ending.match(self._buffer, partial=True)
        if found and found.partial and not final:
            return False
        calls = _calls_in(self._value) if found else None
        if found is None or calls is None:
            return self._reject()
        for name, arguments in calls:
            self._start(name)
            self._settled.append(CallArguments(self.num_calls - 1, arguments))
        self._take(found.end())
        self._value = ""
        self._state = self._content
        return True

    def _start(self, name: str) -> None:
        seed = f"{self._id_seed}-{self.num_calls}".encode()
        digest = hashlib.sha256(seed).hexdigest()[: self._form.id_chars]
        self._settled.append(CallStart(self.num_calls, self._form.id_prefix + digest, name))
        self.num_calls += 1

    def _reject(self) -> bool:
        """No call: what opened it is content, and what came after it may hold another."""
        self._write(self._opened)
        self._buffer, self._value = self._value + self._buffer, ""
        self._state = self._content
        return True

    def _write(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body and self.num_calls and not self._wrote_content:
            body = body.lstrip()
        if body:
            self._wrote_content = True
            self._settled.append(Content(body))


def _calls_in(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of the calls that a JSON value holds; None where it holds others."""
    try:
        value = from_json(text)
        calls = [_read_call(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, TypeError, KeyError):
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
        arguments = from_json(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("no arguments")
    return call["name"], json.dumps(arguments, ensure_ascii=False)
