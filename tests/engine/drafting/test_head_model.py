"""Chains of heads in graphs and recordings: forwards that run again draft what they drafted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from drafters.model.heads import Eagle3Drafter
from drafters.registry import build_drafters
from engine.attention.backend import AttentionBackend, build_attention
from engine.capture import captures
from engine.capture.captures import Captures, Planned
from engine.capture.replays import DeviceGraphs, GraphSizes
from engine.drafting import head_model
from engine.drafting.head_model import ChainHead
from engine.request.params import GenerationRequest, SamplingParams
from kvpool.store import KVStore
from worlds.device_world import no_host
from worlds.engine_harness import Driver, Setup, circle_prompt, drafting, request
from worlds.graph_maker import ReplayingMaker
from worlds.static_attention import StaticAttention
from worlds.trained_heads import EAGLE3_FORMS, TARGET, chain_needs, eagle_network, limits

SETUP = Setup(prefill_chunk=7, num_blocks=97, max_num_batched_tokens=64)
SIZES = GraphSizes(16, 6, 64, 8)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, seed=3)
WAYS = pytest.mark.parametrize("way", [nullcontext, no_host], ids=["by level", "ahead"])
FORMS = pytest.mark.parametrize("form", ["eagle3", "eagle3_reduced", "p_eagle"])


def head_in_graphs(
    form: str, monkeypatch: pytest.MonkeyPatch, maker: ReplayingMaker | None
) -> ChainHead:
    network = eagle_network(EAGLE3_FORMS[form])
    needs = chain_needs(network, SETUP)

    def replays(
        planned: Planned, attention: AttentionBackend, sizes: GraphSizes | None, _: int
    ) -> object:
        assert maker is not None
        assert sizes is not None
        return DeviceGraphs(planned, attention, maker, sizes)

    store = KVStore(num_blocks=97, device="cpu", **needs.store_sizes())
    with monkeypatch.context() as patch:
        if maker is not None:
            patch.setattr(head_model, "make_replays", replays)
        made = ChainHead(
            network, StaticAttention(store, needs), limits(SETUP), None if maker is None else SIZES
        )
    made.prepare()
    made.max_catch_up_rows = 40  # masks stand behind them, and the attention here has 64 rows
    return made


def run(head: ChainHead, setup: Setup, *requests: GenerationRequest) -> Driver:
    drafters = build_drafters() | {"eagle3": Eagle3Drafter(head)}
    return Driver(TARGET.core(replace(setup, drafters=drafters))).run(*requests)


def assert_equal_drafts(got: Driver, expected: Driver) -> None:
    assert got.token_ids == expected.token_ids
    assert got.drafted == expected.drafted
    assert got.num_draft_tokens == expected.num_draft_tokens
    assert sum(map(sum, got.drafted.values())) > 0


@FORMS
@WAYS
def test_drafts_of_a_captured_head_are_those_of_the_head(
    way: type[nullcontext[None]], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more rows than any graph has, chains and trees of several requests."""
    requests = [
        request(
            f"{index}",
            circle_prompt(index),
            replace(sampling, seed=index),
            drafting("eagle3", num_tokens=6, width=width, min_confidence=0.0),
        )
        for index, (sampling, width) in enumerate(
            [(GREEDY, 1), (SAMPLED, 1), (GREEDY, 3), (SAMPLED, 2)]
        )
    ]
    maker = ReplayingMaker()
    with way():
        driver = run(head_in_graphs(form, monkeypatch, maker), SETUP, *requests)
        usual = run(head_in_graphs(form, monkeypatch, None), SETUP, *requests)
    assert maker.num_replays > 3
    assert_equal_drafts(driver, usual)


def test_a_head_that_cannot_be_captured_drafts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = ReplayingMaker()

    def refuse(_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(maker, "capture", refuse)
    each = request("r", circle_prompt(1), GREEDY, drafting("eagle3", num_tokens=4))
    driver = run(head_in_graphs("eagle3", monkeypatch, maker), SETUP, each)
    usual = run(head_in_graphs("eagle3", monkeypatch, None), SETUP, each)
    assert_equal_drafts(driver, usual)
    assert maker.num_replays == 0


@FORMS
def test_forwards_of_a_head_are_recorded(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs whose kernels can be recorded: features lie where a recording reads them, in steps of any
    number of rows."""
    setup = Setup(block_size=16, num_blocks=64, max_num_batched_tokens=64)
    monkeypatch.setattr(captures, "_OFTEN", 2)

    def head() -> ChainHead:
        torch.manual_seed(0)
        network = eagle_network(EAGLE3_FORMS[form])
        attention = build_attention(chain_needs(network, setup), setup.num_blocks, "paged")
        return ChainHead(network, attention, limits(setup))

    requests = [
        request(
            f"{index}",
            circle_prompt(index % 4)[: 24 - index],
            replace(GREEDY, max_tokens=24 + 3 * index),
            drafting("eagle3", num_tokens=5, width=1 + index % 2, min_confidence=0.0),
        )
        for index in range(6)
    ]
    recorded, usual = head(), head()
    assert isinstance(recorded._replays, Captures)
    usual._replays._close("the test compares with it")  # type: ignore[attr-defined]
    assert_equal_drafts(run(recorded, setup, *requests), run(usual, setup, *requests))
    assert any(each.known for each in recorded._replays._captures.values())
