"""A file in the folder of endpoints is served, and stands in the schema and the documentation."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

import server.endpoints
from drafters.options import SpeculativeParams
from engine.speculation.gamma import gamma_policy_names
from server.request.speculative import SpeculativeField
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


async def test_a_form_can_be_made_of_what_is_listed() -> None:
    """Drafters with their options, defaults and caps; and the fields of ``speculative``."""
    caps = {"max_speculative_tokens": 12, "max_tree_width": 3, "draft_strategies": ["ngram"]}
    settings = {"speculative": {"num_speculative_tokens": 6}, "speculative_caps": caps}
    async with serve(ScriptedEngine(), **settings) as client:
        listed = (await client.get("/drafters")).json()
    assert [each["id"] for each in listed["data"]] == ["none", "ngram"]
    option = {"name": "max_match", "default": 4, "description": "longest match"}
    assert listed["data"][1]["options"] == [option | {"minimum": 1, "maximum": 16}]
    assert listed["data"][1]["drafts_trees"] is False
    assert listed["policies"] == ["fixed", "target_rate", "goodput"]
    assert listed["tree_strategies"] == ["auto", "none", "linear", "tree"]
    assert listed["defaults"]["draft_strategy"] == "ngram"
    assert listed["defaults"]["max_speculative_tokens"] == 6
    assert listed["caps"]["max_speculative_tokens"] == 12
    told = {each["name"]: each for each in listed["fields"]}
    names = [each.name for each in fields(SpeculativeParams)]
    assert list(told) == list(listed["defaults"]) == names == list(SpeculativeField.model_fields)
    assert all(each["description"] for each in told.values())
    assert (told["tree_width"]["minimum"], told["tree_width"]["maximum"]) == (1, 3)
    assert told["num_speculative_tokens"]["maximum"] == 12
    assert (told["target_acceptance_rate"]["minimum"], told["options"]["maximum"]) == (0, None)
    choices = told["adaptive_depth"]["choices"]
    assert tuple(each["id"] for each in choices) == gamma_policy_names()
    assert choices[0]["fields"] == ["num_speculative_tokens"]
    assert all(each["description"] for each in choices)
    assert [each["id"] for each in told["verification"]["choices"]] == listed["verifications"]
