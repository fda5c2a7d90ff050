"""A file in the folder of endpoints is served, and stands in the schema and the documentation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import server.endpoints
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve

ROOT = Path(__file__).resolve().parents[3]


async def test_the_documented_file_is_a_new_endpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (source,) = re.findall(r'```python title="\S+pieces.py"\n(.*?)```', page, re.DOTALL)
    (tmp_path / "pieces.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(server.endpoints, "__path__", [*server.endpoints.__path__, str(tmp_path)])
    async with serve(ScriptedEngine()) as client:
        reply = await client.post("/pieces", json={"token_ids": [*b"ab"]})
        assert reply.json() == {"texts": ["a", "b"]}
        refused = await client.post("/pieces", json={"token_ids": [1], "colour": 1})
        assert refused.json()["error"]["param"] == "colour"
        assert "/v1/pieces" in (await client.get("http://test/openapi.json")).json()["paths"]
        assert (await client.get("/models")).status_code == 200
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    line = "| `POST /v1/pieces` | What each token adds to the text of all. |"
    assert line in generate.endpoints_table()
