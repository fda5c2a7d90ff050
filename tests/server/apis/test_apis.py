"""A folder among those of the APIs is served, with its own words in refusals."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import server.apis
from server import errors
from server.request import chat
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve

ROOT = Path(__file__).resolve().parents[3]


async def test_the_documented_folder_is_a_further_api(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (source,) = re.findall(r'```python title="\S+cohere/__init__.py"\n(.*?)```', page, re.DOTALL)
    (tmp_path / "cohere").mkdir()
    (tmp_path / "cohere" / "__init__.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(server.apis, "__path__", [*server.apis.__path__, str(tmp_path)])
    monkeypatch.setattr(errors, "SHAPES", dict(errors.SHAPES))
    monkeypatch.setitem(sys.modules, "server.apis.cohere", None)
    del sys.modules["server.apis.cohere"]
    async with serve(ScriptedEngine("hello")) as client:
        reply = await client.post("/generate", json={"prompt": "a", "num_generations": 2})
        assert [each["text"] for each in reply.json()["generations"]] == ["hello", "hello"]
        for field, value in (("num_generations", 0), ("prompt", "a" * 1000), ("colour", 1)):
            refused = await client.post("/generate", json={"prompt": "a", field: value})
            assert refused.status_code == 400
            assert refused.json()["message"].startswith(f"{field}:")
        assert "/v1/generate" in (await client.get("http://test/openapi.json")).json()["paths"]
        # The others are as they were.
        other = await client.post("/messages", json={})
        assert other.json()["type"] == "error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 4, "top_k": 3, "thinking": {"type": "enabled"}}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4, "reasoning": {"effort": "low"}}),
        ("/api/chat", {"options": {"num_predict": 4, "top_k": 3, "stop": ["x"]}}),
    ],
)
async def test_a_field_is_checked_by_the_clients_model_alone(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[set[str]] = []
    check = chat.check
    monkeypatch.setattr(
        chat, "check", lambda kind, data, names: checked.append({*data}) or check(kind, data, names)
    )
    messages = {} if "input" in body else {"messages": [{"role": "user", "content": "a"}]}
    async with serve(ScriptedEngine("hello")) as client:
        reply = await client.post(f"http://test{path}", json=messages | body)
        assert reply.status_code == 200, reply.text
    assert len(checked) == 1
    assert checked[0] <= {"messages", "tools", "tool_choice"}
