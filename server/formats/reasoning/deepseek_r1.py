"""``...</think>``: DeepSeek R1, which always reasons, and whose prompt may open it."""

from __future__ import annotations

from server.formats.format import ReasoningFormat

FORMAT = ReasoningFormat(
    name="deepseek_r1",
    begin="<think>",
    end="</think>",
    assumed=True,
    writes=lambda template: "</think>" in template and "\uff5cAssistant\uff5c" in template,
)
