"""``{"name": ..., "parameters": {...}}``, alone or after ``<|python_tag|>``: Llama 3.1 to 3.3, and 4
as its own template has it."""

from __future__ import annotations

from regex import compile

from server.formats.format import JSON_HEAD, SPACE, CallSyntax, Spelling, ToolCallFormat

_SPELLING = Spelling(before='{"name": "NAME", "parameters": ', after="}", between="; ")

FORMAT = ToolCallFormat(
    name="llama3",
    markers=("<|python_tag|>",),
    opener=compile(r"<\|python_tag\|>"),
    syntaxes=(CallSyntax(JSON_HEAD, tail=rf"{SPACE}\}}", following=rf"{SPACE}(?P<more>;)"),),
    bare=compile(rf"{SPACE}(?=\{{)"),
    in_text=False,
    never_first=r'\s*\{\s*"(name|type)"',
    spelling=lambda _: _SPELLING,
    writes=lambda template: (
        "<|python_tag|>" in template
        or ("<|python_start|>" in template and '"parameters": ' in template)
    ),
)
