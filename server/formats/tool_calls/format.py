"""What there is to say of a way of writing tool calls: how it is found, read and asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regex import Pattern, compile

from server.formats.tool_calls.arguments import (
    ArgumentsReader,
    GrammarLines,
    JsonArguments,
    Schema,
    json_rule,
)

SPACE = r"\s{0,64}"
"""White space between the words of a call. Bounded, since what it matches is looked at again with
every token."""

JSON_HEAD = (
    rf'{SPACE}\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    rf'"name"{SPACE}:{SPACE}"(?P<name>[\w.-]{{1,128}})"{SPACE},{SPACE}'
    rf'"(?:arguments|parameters)"{SPACE}:{SPACE}(?P<arguments>\{{)'
)
"""The beginning of ``{"name": ..., "arguments": {``."""


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
    """A file of this folder whose ``FORMAT`` is one of these adds a format.

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
