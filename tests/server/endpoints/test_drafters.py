"""``/v1/drafters``: what a form needs to know; a card says what drafts for its drafter, and not where
that lies."""

from __future__ import annotations

from dataclasses import fields, replace

from drafters.base import DrafterInfo
from drafters.options import SpeculativeParams
from engine.request.info import DraftInfo
from engine.speculation.gamma import gamma_policy_names
from server.request.speculative import SpeculativeField
from worlds.scraping import scrape, value
from worlds.scripted_engine import ScriptedEngine, engine_info
from worlds.serving import serve

CHECKED = DraftInfo("tuned", "eagle3", "/models/heads/second", 1234, (2, 6, 9), 0.6, "shifted by 1")
UNCHECKED = DraftInfo("fast", "small_model", "org/small", 77)


async def test_named_drafts_are_drafters_as_any_other() -> None:
    info = engine_info()
    named = {name: DrafterInfo(name, "Drafts.") for name in ("tuned", "fast")}
    drafts = {"tuned": CHECKED, "fast": UNCHECKED}
    engine = ScriptedEngine()
    engine.info = replace(info, drafters={**info.drafters, **named}, drafts=drafts)
    async with serve(engine) as client:
        reply = (await client.get("http://test/v1/drafters")).json()
        cards = {card["id"]: card["draft"] for card in reply["data"]}
        metrics = await scrape(client)
        body = {"model": info.model, "prompt": "a", "max_tokens": 2}
        for name, status in (("tuned", 200), ("fast", 200), ("slow", 400)):
            asked = {**body, "speculative": {"draft_strategy": name}}
            answer = await client.post("http://test/v1/completions", json=asked)
            assert answer.status_code == status, answer.text
    assert cards == {
        **dict.fromkeys(info.drafters),
        "tuned": {
            "method": "eagle3",
            "path": "second",
            "num_parameters": 1234,
            "hidden_layers": [2, 6, 9],
            "agreement": 0.6,
            "note": "shifted by 1",
        },
        "fast": {
            "method": "small_model",
            "path": "small",
            "num_parameters": 77,
            "hidden_layers": [],
            "agreement": None,
            "note": "",
        },
    }
    assert value(metrics, "slipstream_draft_agreement", drafter="tuned") == 0.6
    shown = [dict(labels) for name, labels in metrics if name == "slipstream_draft_agreement"]
    assert shown == [{"drafter": "tuned"}]


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
