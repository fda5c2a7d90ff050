"""DeepSeek's tokens around each call: V3 and R1 put the arguments into a block of code, V3.1 and later do
not."""

from __future__ import annotations

from regex import compile

from server.formats.format import SPACE, CallSyntax, Spelling, ToolCallFormat

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_NAME = r"(?P<name>[\w.-]{1,128})"
_FOLLOWING = rf"{SPACE}(?:(?P<more>{_CALL})|{_CALLS_END})"

_IN_A_BLOCK = CallSyntax(
    # The mark of a call after the first was read when it showed that there is one.
    rf"(?:{SPACE}{_CALL})?function{_SEP}{_NAME}{SPACE}```json{SPACE}(?P<arguments>\{{)",
    tail=rf"{SPACE}```{SPACE}{_CALL_END}",
    following=_FOLLOWING,
)
_PLAIN = CallSyntax(
    rf"(?:{SPACE}{_CALL})?{_NAME}{_SEP}{SPACE}(?P<arguments>\{{)",
    tail=rf"{SPACE}{_CALL_END}",
    following=_FOLLOWING,
)
_SPELT_IN_A_BLOCK = Spelling(
    begin=_CALLS,
    before=f"{_CALL}function{_SEP}NAME\n```json\n",
    after=f"\n```{_CALL_END}",
    between="\n",
    end=_CALLS_END,
)
_SPELT_PLAIN = Spelling(begin=_CALLS, before=f"{_CALL}NAME{_SEP}", after=_CALL_END, end=_CALLS_END)

FORMAT = ToolCallFormat(
    name="deepseek_v3",
    markers=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP),
    opener=compile(_CALLS),
    syntaxes=(_IN_A_BLOCK, _PLAIN),
    spelling=lambda template: _SPELT_IN_A_BLOCK if "```json" in template else _SPELT_PLAIN,
    writes=lambda template: _CALLS in template,
)
