"""A call's arguments as the formats of tool calls write them."""

from __future__ import annotations

import json
from typing import Any

TAGGED = {
    "qwen3_coder": ("<parameter={}>\n", "\n</parameter>\n"),
    "glm4": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
}


def written(form: str, arguments: dict[str, Any]) -> str:
    """The text of ``arguments``; those of most formats are JSON."""
    if form in TAGGED:
        begin, end = TAGGED[form]
        return "".join(
            begin.format(name) + (value if isinstance(value, str) else _json(value)) + end
            for name, value in arguments.items()
        )
    if form == "pythonic":
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
