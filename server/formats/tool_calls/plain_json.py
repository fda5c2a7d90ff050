"""``[{"name": ..., "arguments": {...}}, ...]``: no model's own way, and what calls that must come are
written in where the model's is not known."""

from __future__ import annotations

from regex import compile

from server.formats.format import JSON_HEAD, SPACE, CallSyntax, Spelling, ToolCallFormat

_SPELLING = Spelling(
    begin="[", before='{"name": "NAME", "arguments": ', after="}", between=", ", end="]"
)

FORMAT = ToolCallFormat(
    name="plain_json",
    markers=(),
    # A text is calls from its beginning, or has none.
    opener=compile(r"(?!)"),
    syntaxes=(
        CallSyntax(
            rf"(?:{SPACE}\[)?{JSON_HEAD}",
            tail=rf"{SPACE}\}}",
            following=rf"{SPACE}(?:(?P<more>,)|\])",
        ),
    ),
    bare=compile(rf"{SPACE}(?=[\[{{])"),
    in_text=False,
    never_first=r'\s*\[?\s*\{\s*"(name|type)"',
    spelling=lambda _: _SPELLING,
    writes=lambda _: False,
)
