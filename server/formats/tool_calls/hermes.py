"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from regex import compile

from server.formats.format import JSON_HEAD, SPACE, CallSyntax, Spelling, ToolCallFormat

_SPELLING = Spelling(
    before='<tool_call>\n{"name": "NAME", "arguments": ', after="}\n</tool_call>", between="\n"
)

FORMAT = ToolCallFormat(
    name="hermes",
    markers=("<tool_call>", "</tool_call>"),
    opener=compile("<tool_call>"),
    syntaxes=(CallSyntax(JSON_HEAD, tail=rf"{SPACE}\}}{SPACE}</tool_call>"),),
    ending=compile(rf"{SPACE}</tool_call>"),
    spelling=lambda _: _SPELLING,
    # Some models write something else between these markers.
    writes=lambda template: (
        "<tool_call>" in template and not ("<function=" in template or "<arg_key>" in template)
    ),
)
