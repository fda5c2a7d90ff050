"""``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5 and
later."""

from __future__ import annotations

from regex import compile

from server.formats.format import SPACE, CallSyntax, Spelling, ToolCallFormat
from server.formats.tool_calls.tagged import Tags

_TAGS = Tags(
    begin=rf"<arg_key>(?P<name>[^<>\s]{{1,128}})</arg_key>{SPACE}<arg_value>",
    end="</arg_value>",
    close="</tool_call>",
    on_lines=False,
    before="<arg_key>NAME</arg_key>\n<arg_value>",
    after="</arg_value>\n",
)
_SPELLING = Spelling(
    before="<tool_call>NAME\n", after="</tool_call>", between="\n", arguments=_TAGS.rules
)

FORMAT = ToolCallFormat(
    name="glm4",
    # Tags inside of a call are no special tokens.
    markers=("<tool_call>", "</tool_call>"),
    opener=compile("<tool_call>"),
    syntaxes=(
        CallSyntax(
            rf"{SPACE}(?P<name>[\w.-]{{1,128}}){SPACE}(?P<arguments>)(?=<arg_key>|</tool_call>)",
            reader=_TAGS.reader,
        ),
    ),
    spelling=lambda _: _SPELLING,
    writes=lambda template: "<arg_key>" in template,
)
