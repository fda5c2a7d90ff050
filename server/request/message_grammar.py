"""What a message has to match: reasoning, then calls of tools or an answer, as one grammar of llguidance.

Reasoning is free text up to its end; so is what comes before a call that need not come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from regex import compile

from server.errors import refused
from server.formats.format import ReasoningFormat, Schema, Spelling
from server.formats.tool_calls.arguments import in_regex, word

_WORDS = compile(r'"[^"]*"|[{}]|: |, |[^"{}:,]+|.')
_ANYTHING = "(?s:.*)"


@dataclass(frozen=True, slots=True)
class CallRules:
    """``functions``: (name, schema of the arguments) of each that may be called; ``opener``: what begins
    a call in free text, "" where nothing does and a text either is a call or is not, which then does not
    begin with ``never_first``, a regular expression. ``must``: there is a call, and no text;
    ``parallel``: there may be several.
    """

    functions: Sequence[tuple[str, Schema]]
    spelling: Spelling
    opener: str
    must: bool
    parallel: bool
    never_first: str = ""


class MessageGrammar:
    """Writes grammars for one tokenizer. ``special``: ids of markers that are special tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def write(
        self,
        calls: CallRules | None,
        answer: str,
        reasoning: ReasoningFormat | None,
        reasoning_is_open: bool,
    ) -> str:
        """``answer``: the grammar of text that is no call, "" for any text. One of ``calls`` and
        ``answer`` is given, or both."""
        body = _Body(self._special, calls, bool(answer))
        lines = ["start: body"]
        if reasoning is not None:
            lines = ["start: thinking body", *body.thinking(reasoning, reasoning_is_open)]
        lark = "\n".join([*lines, *body.rules()]) + "\n"
        return _nested(lark, answer) if answer else lark


class _Body:
    """The rules of one grammar."""

    def __init__(
        self, special: Mapping[str, int], calls: CallRules | None, has_answer: bool
    ) -> None:
        self._special = special
        self._calls = calls
        self._has_answer = has_answer
        # How free text must not begin.
        self._not_first: list[str] = []
        # What stands before text.
        self._before_text = ""

    def thinking(self, form: ReasoningFormat, is_open: bool) -> Iterator[str]:
        """Comes before ``rules``: text that begins like reasoning is reasoning."""
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

    def rules(self) -> Iterator[str]:
        """``body`` and what it is made of."""
        if self._has_answer:
            yield "answer: @given"
        if self._calls is None:
            yield f"body: {self._before_text} answer"
            return
        calls = self._calls
        if calls.must:
            yield "body: calls"
        elif self._has_answer:
            yield f"body: calls | {self._before_text} answer"
        elif calls.opener:
            yield "body: text_before calls_opened | text"
            yield from self._up_to("text_before", calls.opener)
            yield f"text: TEXT\nTEXT: {self._any_text()}{self._without(calls.opener)}"
        else:
            yield f"body: calls | {self._before_text} text"
            if calls.never_first:
                self._not_first.append(calls.never_first)
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
        if calls.opener and not calls.must and not self._has_answer:
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
        words = _WORDS.findall(text) if self._has_answer else [text] if text else []
        return " ".join(map(word, words))


def _nested(lark: str, answer: str) -> str:
    """The grammar, with ``answer`` as its rule ``@given``."""
    given = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    first = {"name": "message", "lark_grammar": lark}
    return json.dumps({"grammars": [first, {**given[0], "name": "given"}, *given[1:]]})


def check_schema(schema: Schema, spelling: Spelling, field: str) -> None:
    """Raises ApiError 400 where arguments that are spelt so cannot be held to it."""
    from llguidance import LLMatcher

    try:
        # Of what is wrong with the schema itself, this knows where.
        fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        lines = fault or "\n".join(["start: arguments", *spelling.arguments("arguments", schema)])
        fault = fault or LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lines))
    except (ValueError, RecursionError) as error:
        fault = str(error)
    if fault:
        raise refused(field, f"cannot be used: {fault.strip()}")
