"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``, each on lines of
its own: Qwen 3 Coder, and Nemotron 3."""

from __future__ import annotations

from regex import compile

from server.formats.format import SPACE, CallSyntax, Spelling, ToolCallFormat
from server.formats.tool_calls.tagged import Tags

_TAGS = Tags(
    begin=r"<parameter=(?P<name>[^<>\s]{1,128})>",
    end="</parameter>",
    close="</function>",
    on_lines=True,
    before="<parameter=NAME>\n",
    after="\n</parameter>\n",
)
_SPELLING = Spelling(
    before="<tool_call>\n<function=NAME>\n",
    after="</function>\n</tool_call>",
    between="\n",
    arguments=_TAGS.rules,
)

FORMAT = ToolCallFormat(
    name="qwen3_coder",
    markers=("<tool_call>", "</tool_call>"),
    opener=compile("<tool_call>"),
    syntaxes=(
        CallSyntax(
            rf"{SPACE}<function=(?P<name>[\w.-]{{1,128}})>(?P<arguments>)",
            tail=rf"{SPACE}</tool_call>",
            reader=_TAGS.reader,
        ),
    ),
    spelling=lambda _: _SPELLING,
    writes=lambda template: "<function=" in template and "<parameter=" in template,
)
