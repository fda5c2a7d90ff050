"""EAGLE's layer in graphs: over a maker that repeats and compares, the same is drafted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from drafters.model.eagle import EagleDrafter
from drafters.registry import build_drafters
from engine.attention.backend import AttentionBackend
from engine.capture.replays import DeviceGraphs, GraphSizes
from engine.drafting import eagle
from engine.drafting.draft_model import DraftLimits
from engine.drafting.eagle import EagleModel
from engine.request.params import GenerationRequest, SamplingParams
from kvpool.store import KVStore
from worlds.device_world import no_host
from worlds.engine_harness import TINY_VOCAB, Driver, Setup, circle_prompt, drafting, request
from worlds.graph_maker import ReplayingMaker
from worlds.static_attention import StaticAttention
from worlds.trained_heads import TARGET, eagle_layer, eagle_needs

SETUP = Setup(prefill_chunk=7, num_blocks=97)
SIZES = GraphSizes(16, 6, 64, 8)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, seed=3)
WAYS = pytest.mark.parametrize("way", [nullcontext, no_host], ids=["by level", "ahead"])


def model(monkeypatch: pytest.MonkeyPatch, maker: ReplayingMaker | None) -> EagleModel:
    needs = eagle_needs(SETUP)

    def replays(attention: AttentionBackend, sizes: GraphSizes | None, can_capture: bool) -> object:
        assert not can_capture, "recordings of a CPU are not for this model"
        assert maker is not None
        assert sizes is not None
        return DeviceGraphs(attention, maker, sizes)

    with monkeypatch.context() as patch:
        if maker is not None:
            patch.setattr(eagle, "make_replays", replays)
        made = EagleModel(
            eagle_layer(),
            TARGET.reference.get_input_embeddings(),
            TARGET.reference.get_output_embeddings(),
            StaticAttention(KVStore(num_blocks=97, device="cpu", **needs.store_sizes()), needs),
            DraftLimits(TINY_VOCAB, 256, 64),
            None if maker is None else SIZES,
        )
    made.prepare()
    return made


def run(drafting_model: EagleModel, *requests: GenerationRequest) -> Driver:
    drafters = build_drafters() | {"eagle": EagleDrafter(drafting_model)}
    return Driver(TARGET.core(replace(SETUP, drafters=drafters))).run(*requests)


@WAYS
def test_drafts_of_a_captured_layer_are_those_of_the_layer(
    way: type[nullcontext[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more rows than any graph has, chains and trees of several requests."""
    requests = [
        request(
            f"{index}",
            circle_prompt(index),
            replace(sampling, seed=index),
            drafting("eagle", num_tokens=6, width=width, min_confidence=0.0),
        )
        for index, (sampling, width) in enumerate(
            [(GREEDY, 1), (SAMPLED, 1), (GREEDY, 3), (SAMPLED, 2)]
        )
    ]
    maker = ReplayingMaker()
    with way():
        driver = run(model(monkeypatch, maker), *requests)
        usual = run(model(monkeypatch, None), *requests)
    assert maker.num_replays > 20
    assert driver.token_ids == usual.token_ids
    assert driver.drafted == usual.drafted
    assert driver.num_draft_tokens == usual.num_draft_tokens
    assert sum(map(sum, driver.drafted.values())) > 0


def test_a_layer_that_cannot_be_captured_drafts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = ReplayingMaker()

    def refuse(_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(maker, "capture", refuse)
    each = request("r", circle_prompt(1), GREEDY, drafting("eagle", num_tokens=4))
    driver = run(model(monkeypatch, maker), each)
    usual = run(model(monkeypatch, None), each)
    assert driver.num_draft_tokens == usual.num_draft_tokens
    assert driver.token_ids == usual.token_ids
    assert driver.num_draft_tokens["r"] > 0
    assert maker.num_replays == 0
