"""A format: a way in which a family of models writes reasoning or tool calls, found, read and asked for.

Texts come in pieces, and what is found in them does not depend on the pieces: a ``Scanner`` lets a text
wait until it is settled what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from regex import Match, Pattern, compile

from server.formats.json_rules import json_rule

Settled = TypeVar("Settled")
State: TypeAlias = Callable[[bool], bool]
"""A state takes what it can from the front of the scanner's text, told whether nothing follows it, and
names the next state where it is done. It returns whether that has something to do."""


class Scanner(Generic[Settled]):
    """Goes from state to state over a text. What is settled is what the states add to ``_settled``."""

    def __init__(self, first: State) -> None:
        self._state = first
        self._buffer = ""
        self._settled: list[Settled] = []

    def feed(self, text: str, final: bool = False) -> list[Settled]:
        """Returns what the text settles. ``final``: nothing follows it."""
        self._buffer += text
        while self._state(final):
            pass
        settled, self._settled = self._settled, []
        return settled

    def finish(self) -> list[Settled]:
        """Returns what was held back, at the end of the choice."""
        return self.feed("", final=True)

    def _take(self, num_chars: int) -> str:
        """Removes the first characters from the text and returns them."""
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken

    def _until(self, pattern: Pattern[str], final: bool) -> tuple[str, Match[str] | None]:
        """Removes the text up to and with the first match, and returns what came before it and the match:
        None where there is none yet."""
        found = pattern.search(self._buffer, partial=not final)
        text = self._take(found.start() if found else len(self._buffer))
        if found is None or found.partial:
            return text, None
        self._take(len(found[0]))
        return text, found


# --- reasoning ---

Piece: TypeAlias = tuple[str, str]
"""Reasoning and content, in this order; pieces follow each other."""


class Splitter(Scanner[Piece]):
    """Takes the reasoning out of one choice's text. Subclasses say where the reasoning begins and ends,
    markers included, by the number of characters that were taken before (``_at``)."""

    def __init__(self, first: State) -> None:
        super().__init__(first)
        self._at = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def is_reasoning(self, at: int) -> bool:
        """Returns whether the character there is, markers included."""
        is_open = len(self._starts) > len(self._ends) and at >= self._starts[-1]
        spans = zip(self._starts, self._ends, strict=False)
        return is_open or any(start <= at < end for start, end in spans)

    def _take(self, num_chars: int) -> str:
        self._at += num_chars
        return super()._take(num_chars)


@dataclass(frozen=True)
class ReasoningFormat:
    """A file of ``reasoning`` whose ``FORMAT`` is one of these adds a format: reasoning stands between
    ``begin`` and ``end``, before the answer.

    ``assumed``: whether a text reasons from its first word where the prompt has neither opened nor
    closed the reasoning. ``writes``: whether a model with this chat template writes so. Of several that
    say so, the first by name is taken.

    ``markers``: further texts that may be special tokens and have to be seen. ``answer``: what an answer
    begins with, for a model that always reasons before it. ``splitter``: where reasoning does not just
    come first; made with whether the text begins inside it.
    """

    name: str
    begin: str
    end: str
    assumed: bool
    writes: Callable[[str], bool]
    markers: tuple[str, ...] = ()
    answer: str = ""
    splitter: Callable[[bool], Splitter] | None = None

    def is_open_after(self, prompt: str, continued: str = "") -> bool:
        """Returns whether a text after this prompt begins inside the reasoning. ``continued``: the
        content of the message that it goes on with; without markers it is of the answer."""
        if continued.strip():
            return continued.rfind(self.begin) > continued.rfind(self.end)
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (self.assumed and not prompt.endswith(self.end))


# --- tool calls ---

Schema: TypeAlias = Mapping[str, Any]
GrammarLines: TypeAlias = Callable[[str, Schema], Iterator[str]]
"""Lines of a grammar of llguidance, of which the rule of the given name is what arguments of the schema
may be written as. Raises ValueError where they cannot be held to the schema."""

SPACE = r"\s{0,64}"
"""White space between the words of a call. Bounded, since what it matches is looked at again with
every token."""

JSON_HEAD = (
    rf'{SPACE}\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rf'"name"{SPACE}:{SPACE}"(?P<name>[\w.-]{{1,128}})"{SPACE},{SPACE}'
    rf'"(?:arguments|parameters)"{SPACE}:{SPACE}(?P<arguments>\{{)'
)
"""The beginning of ``{"name": ..., "arguments": {``."""

_OUTSIDE_STRINGS, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_ESCAPED = re.compile(".", re.DOTALL)


class ArgumentsReader(Scanner[str]):
    """Makes JSON of one call's arguments. ``ended``: nothing that follows belongs to them."""

    ended = False

    @property
    def rest(self) -> str:
        """The text after them."""
        return self._buffer


class JsonArguments(ArgumentsReader):
    """Arguments that are JSON go out as they come, up to the bracket that closes the first one; what is
    between brackets is not judged."""

    def __init__(self, schema: Schema) -> None:  # noqa: ARG002
        super().__init__(self._value)
        self._next = _OUTSIDE_STRINGS
        self._depth = 0

    def _value(self, final: bool) -> bool:  # noqa: ARG002
        at = 0
        while not self.ended and (found := self._next.search(self._buffer, at)):
            at = found.end()
            self._pass(found[0])
        self._settled.append(self._take(at if self.ended else len(self._buffer)))
        return False

    def _pass(self, char: str) -> None:
        if self._next is _ESCAPED:
            self._next = _IN_STRING
        elif char == "\\":
            self._next = _ESCAPED
        elif char == '"':
            self._next = _OUTSIDE_STRINGS if self._next is _IN_STRING else _IN_STRING
        else:
            self._depth += 1 if char in "{[" else -1
            self.ended = self._depth == 0


class CallSyntax:
    """One call in regular expressions. None may end in what can be there or not: whether it has matched
    would then depend on how much of the text had come.

    ``head``: what comes before the arguments, which begin with its group ``arguments``; the function's
    name is ``name``. ``tail``: what comes after the arguments. ``following``: what comes after a call;
    its group ``more``, where it matched, promises another. ``reader``: what makes JSON of the arguments
    of a function with this schema.
    """

    def __init__(
        self,
        head: str,
        tail: str = "",
        following: str = "",
        reader: Callable[[Schema], ArgumentsReader] = JsonArguments,
    ) -> None:
        self.head: Pattern[str] = compile(head)
        self.tail: Pattern[str] = compile(tail)
        self.following: Pattern[str] | None = compile(following) if following else None
        self.reader = reader


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a model is made to write calls: ``begin``, the calls with ``between`` in between, ``end``.

    A call is ``before``, in which ``NAME`` stands for the function's, its ``arguments``, and ``after``.
    ``between`` None: it writes one call at a time.
    """

    before: str
    after: str
    begin: str = ""
    between: str | None = ""
    end: str = ""
    arguments: GrammarLines = json_rule


@dataclass(frozen=True)
class ToolCallFormat:
    """A file of ``tool_calls`` whose ``FORMAT`` is one of these adds a format.

    ``markers``: texts that may be special tokens, which are shown to the parser nevertheless.
    ``opener``: after it a call is read; ``in_text``: the first marker begins a call in free text, or else
    a text is calls or has none. ``bare``: what a call without an opener begins with, which
    only counts as the first thing of a text and with the name of a function of the request;
    ``never_first``: a regular expression for it, which texts that are no calls do not begin with.
    ``ending``: what comes after a call whose words stand in another order.
    ``spelling``: by the chat template. ``writes``: whether a model with this template writes so.
    """

    name: str
    markers: tuple[str, ...]
    opener: Pattern[str]
    syntaxes: tuple[CallSyntax, ...]
    spelling: Callable[[str], Spelling]
    writes: Callable[[str], bool]
    bare: Pattern[str] | None = None
    ending: Pattern[str] = compile("")
    never_first: str = ""
    in_text: bool = True
    id_prefix: str = "call_"
    id_chars: int = 24
