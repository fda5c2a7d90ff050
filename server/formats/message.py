"""A choice's text as a message: reasoning, content and tool calls in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from server.formats.format import Splitter
from server.formats.parts import Content, Part, Reasoning
from server.formats.reasoning.splitter import ReasoningSplitter
from server.formats.registry import reasoning_formats, tool_call_formats
from server.formats.tool_calls.parser import CallParser
from server.plan import TextOptions


class MessageParser:
    """Parses one choice. ``id_seed``: makes the ids of its calls."""

    def __init__(self, options: TextOptions, id_seed: str) -> None:
        self._options = options
        self._reasoning: Splitter | None = None
        self._calls: CallParser | None = None
        if options.reasoning:
            form = reasoning_formats()[options.reasoning]
            make = form.splitter or partial(ReasoningSplitter, form)
            self._reasoning = make(options.reasoning_is_open)
        if options.tool_calls:
            calls = tool_call_formats()[options.tool_calls]
            self._calls = CallParser(calls, options.functions, id_seed)
        self._token_starts: list[int] = []

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._calls is not None and self._calls.is_in_call

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that began inside the reasoning."""
        if self._reasoning is None:
            return 0
        return sum(map(self._reasoning.is_reasoning, self._token_starts))

    def feed(self, text: str, token_starts: Iterable[int] = ()) -> tuple[Part, ...]:
        """Returns the parts that the text settles. ``token_starts``: the places in it of tokens."""
        if self._reasoning is None:
            return self._split_calls(text)
        self._token_starts += token_starts
        return self._split(self._reasoning.feed(text))

    def finish(self) -> tuple[Part, ...]:
        """Returns the parts that were held back, at the end of the choice."""
        parts: tuple[Part, ...] = ()
        if self._reasoning is not None:
            parts = self._split(self._reasoning.finish())
        return parts if self._calls is None else (*parts, *self._calls.finish())

    def _split(self, pieces: Iterable[tuple[str, str]]) -> tuple[Part, ...]:
        found: list[Part] = []
        for reasoning, content in pieces:
            found += (*self._shown(reasoning), *self._split_calls(content))
        return tuple(found)

    def _shown(self, reasoning: str) -> Iterable[Part]:
        if reasoning and self._options.include_reasoning:
            yield Reasoning(reasoning)

    def _split_calls(self, text: str) -> tuple[Part, ...]:
        if self._calls is not None:
            return tuple(self._calls.feed(text))
        return (Content(text),) if text else ()
