"""``<|channel|>commentary to=functions.name<|message|>{...}<|call|>``: gpt-oss, one call at a time."""

from __future__ import annotations

from regex import compile

from server.formats.format import SPACE, CallSyntax, Spelling, ToolCallFormat

# What is between name and arguments may say in which language they are.
_HEADER_END = r"[^<{]{0,64}(?:<\|constrain\|>[^<{]{0,64})?<\|message\|>"

FORMAT = ToolCallFormat(
    name="gpt_oss",
    markers=("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|call|>"),
    opener=compile(r"<\|channel\|>commentary to=functions\."),
    syntaxes=(
        CallSyntax(
            rf"(?P<name>[\w.-]{{1,128}}){_HEADER_END}{SPACE}(?P<arguments>\{{)",
            # As a rule it ends the text, and then it is not in it.
            tail=rf"{SPACE}<\|call\|>",
        ),
    ),
    in_text=False,
    spelling=lambda _: Spelling(
        before="<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        after="",
        between=None,
    ),
    writes=lambda template: "<|channel|>" in template and "to=functions." in template,
)
