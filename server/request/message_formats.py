"""How the served model's messages are read, and what their text is held to."""

from __future__ import annotations

from typing import Any

from server.errors import bad_request, refused
from server.formats.format import F, format_of
from server.formats.message import markers_of
from server.formats.reasoning import reasoning_formats
from server.formats.tool_calls import tool_call_formats
from server.plan import MessageOptions
from server.request.message_grammar import CallRules, MessageGrammar, check_schema
from server.request.protocol import ChatRequest
from server.request.tools import NamedTool, Tool

AUTO, NONE = "auto", "none"


class MessageFormats:
    """``tool_calls`` and ``reasoning``: names of formats; "auto": what the chat template writes, "none":
    texts are not taken apart."""

    def __init__(self, tokenizer: Any, template: str, tool_calls: str, reasoning: str) -> None:
        self._template = template
        self._tool_calls = _named(tool_calls, tool_call_formats(), template)
        self._reasoning = _named(reasoning, reasoning_formats(), template)
        markers = markers_of(MessageOptions(tool_calls=self._tool_calls, reasoning=self._reasoning))
        self._grammar = MessageGrammar(
            {
                str(token): token_id
                for token_id, token in tokenizer.added_tokens_decoder.items()
                if token.special and str(token) in markers
            }
        )

    def check(self, body: ChatRequest) -> None:
        """Raises ApiError 400 where fields of tools and reasoning have no effect here."""
        if not body.tools:
            for name in ("tool_choice", "parallel_tool_calls"):
                value = getattr(body, name)
                if value is not None and value != NONE:
                    raise refused(name, "needs 'tools'")
        elif not self._tool_calls and body.tool_choice != NONE:
            raise refused(
                "tools",
                ": it is not known how this model writes tool calls; the operator can say so "
                "with --tool-call-parser",
            )
        if isinstance(body.tool_choice, NamedTool):
            self._named(body)
        if not body.include_reasoning and not self._reasoning:
            raise bad_request(
                "include_reasoning", "no reasoning is split off from this model's text"
            )

    def tools(self, body: ChatRequest) -> list[Tool]:
        """Those that the model is shown: none where it is to call none."""
        return [] if body.tool_choice == NONE else body.tools or []

    def options(self, body: ChatRequest, prompt: str) -> MessageOptions:
        """``prompt``: what the chat template made of the messages."""
        tools = self.tools(body)
        return MessageOptions(
            tool_calls=self._tool_calls if tools else "",
            functions={tool.function.name: tool.function.schema_of_arguments() for tool in tools},
            reasoning=self._reasoning,
            reasoning_is_open=self._reasoning_is_open(prompt),
            include_reasoning=body.include_reasoning,
        )

    def grammar(self, body: ChatRequest, options: MessageOptions, answer: str) -> str:
        """What the text has to match; ``answer``: what the content has to; "" for anything.

        Raises ApiError 400 where a function's schema cannot be used.
        """
        rules = self._call_rules(body, bool(answer)) if options.tool_calls else None
        if rules is None and not (answer and (options.reasoning or options.tool_calls)):
            return answer
        reasoning = reasoning_formats()[options.reasoning] if options.reasoning else None
        return self._grammar.write(rules, answer, reasoning, options.reasoning_is_open)

    def _reasoning_is_open(self, prompt: str) -> bool:
        return bool(self._reasoning) and reasoning_formats()[self._reasoning].is_open_after(prompt)

    def _named(self, body: ChatRequest) -> list[tuple[int, Tool]]:
        """The tools that may be called, by their places among those given."""
        places = list(enumerate(body.tools or []))
        if not isinstance(body.tool_choice, NamedTool):
            return places
        wanted = body.tool_choice.function.name
        named = [(place, tool) for place, tool in places if tool.function.name == wanted]
        if not named:
            field = "tool_choice.function.name"
            raise refused(field, f": there is no tool {wanted!r} among 'tools'")
        return named

    def _call_rules(self, body: ChatRequest, has_answer: bool) -> CallRules | None:
        """None where the model may write calls as it likes."""
        named = self._named(body)
        must = body.tool_choice not in (None, AUTO)
        is_strict = any(tool.function.strict for _, tool in named)
        parallel = body.parallel_tool_calls is not False
        if not (must or is_strict or not parallel or has_answer):
            return None
        form = tool_call_formats()[self._tool_calls]
        spelling = form.spelling(self._template)
        functions = []
        for place, tool in named:
            schema = tool.function.schema_of_arguments()
            if not must and not tool.function.strict:
                schema = {"type": "object"}
            check_schema(schema, spelling, f"tools.{place}.function.parameters")
            functions.append((tool.function.name, schema))
        return CallRules(
            functions=functions,
            spelling=spelling,
            opener=form.markers[0] if form.in_text else "",
            never_first=form.never_first,
            must=must,
            # A function that is named is called once.
            parallel=parallel and not isinstance(body.tool_choice, NamedTool),
        )


def _named(wanted: str, formats: dict[str, F], template: str) -> str:
    """Returns the name of the format; "" for none."""
    return format_of(formats, template) if wanted == AUTO else wanted.removeprefix(NONE)
