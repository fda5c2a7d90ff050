"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and of newer models
``[TOOL_CALLS]name[ARGS]{...}``, once for each call."""

from __future__ import annotations

from regex import compile

from server.formats.format import JSON_HEAD, SPACE, CallSyntax, Spelling, ToolCallFormat

_LIST = CallSyntax(
    # The bracket stands before the first call, a comma before the others.
    rf"(?:{SPACE}\[)?{JSON_HEAD}",
    # Models that were shown calls with their ids write ids.
    tail=rf'{SPACE}(?:,{SPACE}"id"{SPACE}:{SPACE}"\w{{0,64}}"{SPACE})?\}}',
    following=rf"{SPACE}(?:(?P<more>,)|\])",
)
_NAMED = CallSyntax(
    rf"{SPACE}(?P<name>[\w.-]{{1,128}})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{SPACE}(?P<arguments>\{{)"
)
_SPELT_AS_LIST = Spelling(
    begin="[TOOL_CALLS][",
    before='{"name": "NAME", "arguments": ',
    after="}",
    between=", ",
    end="]",
)
_SPELT_BY_NAME = Spelling(before="[TOOL_CALLS]NAME[ARGS]", after="")

FORMAT = ToolCallFormat(
    name="mistral",
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    opener=compile(r"\[TOOL_CALLS\]"),
    syntaxes=(_LIST, _NAMED),
    spelling=lambda template: _SPELT_BY_NAME if "[ARGS]" in template else _SPELT_AS_LIST,
    writes=lambda template: "[TOOL_CALLS]" in template,
    # Mistral's templates refuse others.
    id_prefix="",
    id_chars=9,
)
