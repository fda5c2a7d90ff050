"""``/v1/drafters``: a card says what drafts for its drafter, and not where that lies."""

from __future__ import annotations

from dataclasses import replace

from drafters.base import DrafterInfo
from engine.request.info import DraftInfo
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
