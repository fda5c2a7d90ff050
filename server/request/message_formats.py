"""How the served model's messages are read, and the grammar that their text is held to: reasoning, then
calls of tools or an answer, as one grammar of llguidance.

Reasoning is free text up to its end; so is what comes before a call that need not come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regex import compile

from server.errors import bad_request, refused
from server.formats.format import ReasoningFormat, Schema, Spelling, ToolCallFormat
from server.formats.json_rules import word
from server.formats.registry import F, format_of, markers_of, reasoning_formats, tool_call_formats
from server.formats.tool_calls.arguments import in_regex
from server.plan import TextOptions
from server.request.grammars import Grammar, json_grammar, written
from server.request.messages import NamedTool, Tool, ToolFields

AUTO, NONE = "auto", "none"
PLAIN = "plain_json"
"""The format of calls that must come, where it is not known how the model writes its own."""
_WORDS = compile(r'"[^"]*"|[{}]|: |, |[^"{}:,]+|.')
_ANYTHING = "(?s:.*)"


class MessageFormats:
    """``tool_calls`` and ``reasoning``: names of formats; "auto": what the chat template writes, "none":
    texts are not taken apart."""

    def __init__(self, tokenizer: Any, template: str, tool_calls: str, reasoning: str) -> None:
        self._template = template
        self._tool_calls = _named(tool_calls, tool_call_formats(), template)
        self._required = self._tool_calls or ("" if tool_calls == NONE else PLAIN)
        self._reasoning = _named(reasoning, reasoning_formats(), template)
        markers = markers_of(self._tool_calls, self._reasoning)
        self._special = {
            str(token): token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and str(token) in markers
        }

    @property
    def knows_calls(self) -> bool:
        return bool(self._tool_calls)

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is split off from the model's text."""
        return bool(self._reasoning)

    def check(self, body: ToolFields) -> None:
        """Raises ApiError 400 where fields of tools and reasoning have no effect here."""
        if not body.tools:
            if body.must_call or body.named:
                raise refused("tool_choice", "needs 'tools'")
        elif not self._format_of(body) and body.tool_choice != NONE:
            raise refused(
                "tools",
                ": it is not known how this model writes tool calls; the operator can say so "
                "with --tool-call-parser, and a 'tool_choice' that requires a call needs no format",
            )
        _callable(body)
        if not body.include_reasoning and not self._reasoning:
            raise bad_request(
                "include_reasoning", "no reasoning is split off from this model's text"
            )

    def options(
        self, body: ToolFields, text: TextOptions, prompt: str, continued: str = ""
    ) -> TextOptions:
        """Adds how the text is taken apart. ``prompt``: what the chat template made of the messages;
        ``continued``: the content of the one that the text goes on with, if any."""
        tools = [tool.function for tool in body.shown_tools]
        form = reasoning_formats().get(self._reasoning)
        return replace(
            text,
            tool_calls=self._format_of(body) if tools else "",
            functions={each.name: each.schema_of_arguments() for each in tools},
            reasoning=self._reasoning,
            reasoning_is_open=form is not None and form.is_open_after(prompt, continued),
            include_reasoning=body.include_reasoning,
        )

    def grammar(self, body: ToolFields, text: TextOptions, answer: Grammar) -> Grammar:
        """Returns the grammar of the text. ``answer`` is that of the content.

        Raises ApiError 400 where no grammar can be made of a function's schema.
        """
        rules, fields, ignored = None, answer.fields, answer.ignored
        if text.tool_calls:
            rules, of_calls = self._call_rules(body, bool(answer))
            fields = (*fields, *(pair for each in of_calls for pair in each.fields))
            ignored = (*ignored, *(path for each in of_calls for path in each.ignored))
        if rules is None and not (answer and text.parses):
            return answer
        grammar = MessageGrammar(self._special, rules, answer.text)
        reasoning = reasoning_formats().get(text.reasoning)
        return Grammar(grammar.write(reasoning, text.reasoning_is_open), fields, ignored)

    def _format_of(self, body: ToolFields) -> str:
        """Returns the name of the format in which calls come; "" where they cannot."""
        return self._required if body.must_call else self._tool_calls

    def _call_rules(
        self, body: ToolFields, has_answer: bool
    ) -> tuple[CallRules | None, list[Grammar]]:
        """None where the model may write calls as it likes. Also the grammars of arguments, by which it
        shows whether they can be held to."""
        tools = _callable(body)
        must = body.must_call
        is_strict = any(tool.function.strict for _, tool in tools)
        parallel = body.parallel_tool_calls is not False
        if not (must or is_strict or not parallel or has_answer):
            return None, []
        form = tool_call_formats()[self._format_of(body)]
        spelling = form.spelling(self._template)
        functions, grammars = [], []
        for place, tool in tools:
            schema = tool.function.schema_of_arguments()
            if not must and not tool.function.strict:
                schema = {"type": "object"}
            field = f"tools.{place}.function.parameters"
            # Of what is wrong with the schema itself, the first knows where.
            plain = json_grammar(schema, field)
            grammars += [plain, spelt(plain.schema, spelling, field)]
            functions.append((tool.function.name, plain.schema))
        # A function that is named is called once.
        parallel = parallel and not isinstance(body.tool_choice, NamedTool)
        return CallRules(functions, form, spelling, must, parallel), grammars


def _named(wanted: str, formats: dict[str, F], template: str) -> str:
    """Returns the name of the format; "" for none."""
    return format_of(formats, template) if wanted == AUTO else wanted.removeprefix(NONE)


def _callable(body: ToolFields) -> list[tuple[int, Tool]]:
    """The tools that may be called, by their places among those given. Raises ApiError 400 where one that
    is named is not there."""
    places = {tool.function.name: (place, tool) for place, tool in enumerate(body.tools or [])}
    for name, field in body.named.items():
        if name not in places:
            raise refused(field, f": there is no tool {name!r} among 'tools'")
    return [places[name] for name in body.named or places]


@dataclass(frozen=True, slots=True)
class CallRules:
    """``functions``: (name, schema of the arguments) of each that may be called. ``must``: there is a
    call, and no text; ``parallel``: there may be several."""

    functions: Sequence[tuple[str, Schema]]
    form: ToolCallFormat
    spelling: Spelling
    must: bool
    parallel: bool

    @property
    def opener(self) -> str:
        """Returns what begins a call in free text; "" where nothing does, and a text either is a call or
        is not."""
        return self.form.markers[0] if self.form.in_text else ""


class MessageGrammar:
    """The grammar of a message. ``special``: ids of markers that are special tokens. ``answer``: the
    grammar of text that is no call, "" for any text. ``calls`` or ``answer`` is there, or both."""

    def __init__(self, special: Mapping[str, int], calls: CallRules | None, answer: str) -> None:
        self._special = special
        self._calls = calls
        self._answer = answer
        # How free text must not begin.
        self._not_first: list[str] = []
        # What stands before text.
        self._before_text = ""

    def write(self, reasoning: ReasoningFormat | None, reasoning_is_open: bool) -> str:
        lines = ["start: body"]
        if reasoning is not None:
            lines = ["start: thinking body", *self._thinking(reasoning, reasoning_is_open)]
        lark = "\n".join([*lines, *self._rules()]) + "\n"
        return _nested(lark, self._answer) if self._answer else lark

    def _thinking(self, form: ReasoningFormat, is_open: bool) -> Iterator[str]:
        """Comes before ``_rules``: text that begins like reasoning is reasoning."""
        yield "gap: /\\s{0,4}/"
        yield from self._up_to("thought", form.end)
        if form.answer:
            self._before_text = self._text(form.answer)
            yield f"thinking: {'' if is_open else self._text(form.begin)} thought gap"
            return
        # White space belongs to the gap, where there is one.
        self._not_first = ["\\s"]
        if is_open:
            yield "thinking: thought gap"
            return
        yield f"thinking: ({self._text(form.begin)} thought gap)?"
        if form.begin not in self._special:
            self._not_first.append(in_regex(form.begin))

    def _rules(self) -> Iterator[str]:
        """``body`` and what it is made of."""
        if self._answer:
            yield "answer: @given"
        if self._calls is None:
            yield f"body: {self._before_text} answer"
            return
        calls = self._calls
        if calls.must:
            yield "body: calls"
        elif self._answer:
            yield f"body: calls | {self._before_text} answer"
        elif calls.opener:
            yield "body: text_before calls_opened | text"
            yield from self._up_to("text_before", calls.opener)
            yield f"text: TEXT\nTEXT: {self._any_text()}{self._without(calls.opener)}"
        else:
            yield f"body: calls | {self._before_text} text"
            if calls.form.never_first:
                self._not_first.append(calls.form.never_first)
            yield f"text: TEXT\nTEXT: {self._any_text()}"
        yield from self._call_rules(calls)

    def _call_rules(self, calls: CallRules) -> Iterator[str]:
        spelling = calls.spelling
        between = spelling.between if calls.parallel else None
        more = "" if between is None else f"({self._text(between)} call)*"
        end = self._text(spelling.end)
        # What begins all calls and the first one is one word: beside text, the longest word wins.
        yield f"calls: first_call {more} {end}"
        yield from self._each_call("first_call", calls, spelling.begin)
        if calls.opener and not calls.must and not self._answer:
            yield f"calls_opened: opened_call {more} {end}"
            yield from self._each_call("opened_call", calls, spelling.begin, calls.opener)
        if more:
            yield from self._each_call("call", calls)
        for number, (_, schema) in enumerate(calls.functions):
            yield from spelling.arguments(f"arguments_{number}", schema)

    def _each_call(
        self, rule: str, calls: CallRules, begin: str = "", opener: str = ""
    ) -> Iterator[str]:
        """A call of any function after ``begin``, without ``opener`` where that has been written."""
        yield f"{rule}: {' | '.join(f'{rule}_{n}' for n in range(len(calls.functions)))}"
        after = self._text(calls.spelling.after)
        for number, (name, _) in enumerate(calls.functions):
            before = begin + calls.spelling.before.replace("NAME", name)
            before = self._text(before.removeprefix(opener))
            yield f"{rule}_{number}: {before} arguments_{number} {after}"

    def _any_text(self) -> str:
        return f"/{_ANYTHING}/" + "".join(f" & ~/{each}{_ANYTHING}/" for each in self._not_first)

    def _up_to(self, rule: str, marker: str) -> Iterator[str]:
        """A rule for any text up to and with the first ``marker``."""
        name = rule.upper()
        if marker in self._special:
            yield f"{rule}: {name} {self._text(marker)}\n{name}: {self._any_text()}"
            return
        not_first = self._any_text().removeprefix(f"/{_ANYTHING}/")
        yield f"{rule}[lazy]: {name}\n{name}: /{_ANYTHING}{in_regex(marker)}/{not_first}"

    def _without(self, marker: str) -> str:
        # A regular expression matches no special token.
        if marker in self._special:
            return ""
        return f" & ~/{_ANYTHING}{in_regex(marker)}{_ANYTHING}/"

    def _text(self, text: str) -> str:
        """A text that is to be written as it is. Beside an answer it is cut into the words of JSON, since
        the longest match wins: a longer word would hide those of the answer. Beside free text it is one
        word, which wins against that."""
        for marker, token_id in self._special.items():
            if marker in text:
                before, _, after = text.partition(marker)
                return f"{self._text(before)} <[{token_id}]> {self._text(after)}".strip()
        words = _WORDS.findall(text) if self._answer else [text] if text else []
        return " ".join(map(word, words))


def _nested(lark: str, answer: str) -> str:
    """The grammar, with ``answer`` as its rule ``@given``."""
    given = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    first = {"name": "message", "lark_grammar": lark}
    return json.dumps({"grammars": [first, {**given[0], "name": "given"}, *given[1:]]})


def spelt(schema: Schema, spelling: Spelling, field: str) -> Grammar:
    """The grammar of arguments that are spelt so. Raises ApiError 400 where none can be made."""

    def write(library: Any) -> str:
        lines = ["start: arguments", *spelling.arguments("arguments", schema)]
        grammar: str = library.LLMatcher.grammar_from_lark("\n".join(lines))
        return grammar

    return written(field, write)
