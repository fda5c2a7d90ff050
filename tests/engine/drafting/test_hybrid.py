"""The bundled hybrid as it is served: drafts of its MTP layer come true, and no text changes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from drafters.options import SpeculativeParams
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.names import BUNDLED_HYBRID
from engine.request.params import PLAIN, SamplingParams
from engine.request.stats import SpeculativeStats
from worlds.engine_harness import Driver, drafting, request

DATA = Path(__file__).parents[3] / "bench" / "data"
NUM_TEXTS = 6
DRAFTERS = ("none", "ngram", "mtp")


@cache
def served() -> tuple[EngineCore, list[list[int]], list[list[int]]]:
    """The engine's core, beginnings of code and requests for edits, which training never read."""
    config = EngineConfig(BUNDLED_HYBRID, drafters=DRAFTERS, num_blocks=256)
    engine, tokenizer = build_engine(config)
    assert set(DRAFTERS) <= set(engine.info.drafters)

    def rows(name: str) -> list[dict[str, str]]:
        lines = (DATA / f"heldout_{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[:NUM_TEXTS]]

    code = [list(tokenizer(row["prompt"])["input_ids"]) for row in rows("code")]
    edits = [
        tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=False
        )
        for row in rows("edits")
    ]
    return engine.core, code, edits


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("code", drafting("mtp", num_tokens=3)),
        ("code", drafting("mtp", num_tokens=8, width=3)),
        ("edits", drafting("mtp", num_tokens=3)),
        ("edits", drafting("ngram", num_tokens=8)),
    ],
)
def test_drafts_come_true_and_change_no_text(kind: str, wanted: SpeculativeParams) -> None:
    core, code, edits = served()
    sampling = SamplingParams(max_tokens=64, temperature=0.0)
    driver, account = Driver(core), SpeculativeStats()
    for number, prompt in enumerate(code if kind == "code" else edits):
        plain, drafted = f"plain-{number}", f"drafted-{number}"
        driver.run(request(plain, prompt, sampling, PLAIN))
        driver.run(request(drafted, prompt, sampling, wanted))
        assert driver.token_ids[drafted] == driver.token_ids[plain]
        account.add(driver.finishes[drafted].speculative)
    assert (account.tokens_per_step or 0) >= 1.8
