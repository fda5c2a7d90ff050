"""Drafters may ask the engine for more than token ids: hidden states, slots, probabilities, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drafters.base import NORMED, DrafterInfo, DrafterNeeds, DraftRequest, HiddenRows
from drafters.registry import build_drafters
from drafters.tree import EMPTY, DraftTree
from engine.batch import ForwardOutput, InputBatch
from engine.model.decoder import kept_states
from engine.request.params import SamplingParams
from engine.sampling.noise import request_key
from worlds.engine_harness import (
    DictatedCost,
    Driver,
    Setup,
    TinyTarget,
    circle_prompt,
    drafting,
    request,
)
from worlds.fake_drafters import FakeDrafter, Propose
from worlds.sampled_rows import gumbel_scalar

TARGET = TinyTarget()
NUM_TOKENS = 24


class NeedyDrafter(FakeDrafter):
    """Drafts what ``propose`` says and keeps all it is told."""

    def __init__(self, needs: DrafterNeeds, propose: Propose, num_top: int = 0) -> None:
        super().__init__("needy", propose, num_top=num_top)
        self.info = DrafterInfo("needy", "Asks for much.", drafts_trees=True, needs=needs)
        self.hidden: list[HiddenRows] = []

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        self.hidden += rows


def run(
    needs: DrafterNeeds,
    sampling: SamplingParams,
    num_top: int = 0,
    layers: Sequence[int] | None = None,
) -> tuple[Driver, NeedyDrafter]:
    """Two requests, one with drafts of two right branches, prompts in chunks of five."""
    prompt = circle_prompt(1)
    text = [*prompt, *TARGET.recomputed(request("r", prompt, sampling), NUM_TOKENS + 8)]

    def propose(ask: DraftRequest) -> DraftTree:
        coming = text[len(ask.token_ids) :][:3]
        if len(coming) < 3 or ask.max_nodes < 4:
            return EMPTY
        # A wrong sibling first: accepted rows then do not lie in place.
        return DraftTree([coming[0] ^ 1, coming[0], coming[1], coming[2]], [-1, -1, 1, 2], [0] * 4)

    drafter = NeedyDrafter(needs, propose, num_top)
    if layers is not None:
        drafter.hidden_layers = layers
    setup = Setup(
        prefill_chunk=5, cost=DictatedCost(), drafters=build_drafters() | {"needy": drafter}
    )
    driver = Driver(TARGET.core(setup))
    driver.run(
        request("r", prompt, sampling, drafting("needy", num_tokens=4, width=2)),
        request("other", circle_prompt(2), sampling),
    )
    return driver, drafter


SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3)


def check_states(drafter: NeedyDrafter, request_id: str, token_ids: Sequence[int]) -> None:
    """Checks the states of every token of the text but the last, in the order of the drafter's layers."""
    with torch.inference_mode(), kept_states(TARGET.reference, drafter.hidden_layers) as wanted:
        TARGET.reference(input_ids=torch.tensor([token_ids]), use_cache=False)
    position = 0
    for rows in drafter.hidden:
        assert rows.request_id == request_id
        assert rows.first_position == position
        end = position + len(rows.hidden[0])
        for layer, states in zip(drafter.hidden_layers, rows.hidden, strict=True):
            expected = wanted[layer][position:end]
            torch.testing.assert_close(states, expected, atol=2e-4, rtol=1e-3)
        position = end
    assert position == len(token_ids) - 1


@pytest.mark.parametrize("layers", [None, (2, 0)])
def test_hidden_rows_are_the_targets_own_for_every_committed_token(
    layers: Sequence[int] | None,
) -> None:
    """Those that the output head reads, where the drafter says nothing of layers."""
    driver, drafter = run(DrafterNeeds(hidden_rows=True), SAMPLING, layers=layers)
    check_states(drafter, "r", [*circle_prompt(1), *driver.token_ids["r"]])
    assert driver.finishes["r"].speculative.num_accepted_tokens > 10


def test_drafters_that_read_different_layers_get_their_own_each() -> None:
    names, asked = ("first", "second"), set[tuple[int, ...]]()
    drafters = [NeedyDrafter(DrafterNeeds(hidden_rows=True), lambda _: EMPTY) for _ in names]
    drafters[0].hidden_layers = (2, NORMED, 1)
    for name, each in zip(names, drafters, strict=True):
        each.info = replace(each.info, name=name)
    known = build_drafters() | dict(zip(names, drafters, strict=True))
    core = TARGET.core(Setup(prefill_chunk=5, cost=DictatedCost(), drafters=known))
    forward = core.runner.forward

    def asking(batch: InputBatch) -> ForwardOutput:
        asked.add(batch.hidden_layers)
        return forward(batch)

    core.runner.forward = asking  # type: ignore[method-assign]
    driver = Driver(core)
    sampling = replace(SAMPLING, max_tokens=6)
    requests = [
        request(name, circle_prompt(at), sampling, drafting(name)) for at, name in enumerate(names)
    ]
    driver.run(*requests, request("third", circle_prompt(3), replace(sampling, max_tokens=20)))
    for at, (name, each) in enumerate(zip(names, drafters, strict=True)):
        check_states(each, name, [*circle_prompt(at), *driver.token_ids[name]])
    # All that anybody reads, or none: more kinds of steps would need more recordings.
    assert asked == {(NORMED, 1, 2), ()}


def test_slots_for_all_nodes_are_leased_before_the_draft() -> None:
    _, drafter = run(DrafterNeeds(draft_slots=True), SAMPLING)
    asks = [ask for round_ in drafter.asks for ask in round_]
    assert asks
    for ask in asks:
        assert ask.max_nodes == 4  # nothing was short


def test_top_probabilities_are_those_of_the_raw_logits() -> None:
    driver, drafter = run(DrafterNeeds(top_probs=True), SAMPLING, num_top=4)
    token_ids = [*circle_prompt(1), *driver.token_ids["r"]]
    probs = TARGET.logits(token_ids).softmax(-1)
    seen = [each for round_ in drafter.observed for each in round_]
    position = len(circle_prompt(1)) - 1
    for each in seen:
        assert each.top_token_ids is not None
        assert each.top_probs is not None
        for depth, row in enumerate(each.path):
            row_probs = probs[position + depth][each.top_token_ids[row]]
            assert each.top_probs[row] == pytest.approx(row_probs.tolist(), rel=1e-3)
            assert each.top_probs[row] == sorted(each.top_probs[row], reverse=True)
        position += len(each.path)


def test_drafters_get_the_verifiers_noise() -> None:
    _, drafter = run(DrafterNeeds(), SAMPLING)
    sampling = drafter.asks[0][0].sampling
    assert (sampling.temperature, sampling.verification) == (0.8, "match")
    key = request_key(3, 0)
    assert sampling.noise(17, [4, 63]) == [gumbel_scalar(key, 17, 4), gumbel_scalar(key, 17, 63)]
    _, drafter = run(DrafterNeeds(), SamplingParams(max_tokens=4, temperature=0.0))
    assert drafter.asks[0][0].sampling.noise(17, [4, 63]) == [0.0, 0.0]
