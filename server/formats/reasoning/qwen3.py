"""``<think>...</think>``: Qwen 3 and others that reason or do not, by request."""

from __future__ import annotations

from server.formats.format import ReasoningFormat

FORMAT = ReasoningFormat(
    name="qwen3",
    begin="<think>",
    end="</think>",
    assumed=False,
    writes=lambda template: "</think>" in template and "\uff5cAssistant\uff5c" not in template,
)
