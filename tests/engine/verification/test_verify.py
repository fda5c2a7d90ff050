"""Verification by rejection through the whole core: tensors, noise streams, grants and all.

The target is a Markov chain over 16 tokens; requests that differ in their seed alone write three tokens,
most of them with drafts drawn from another chain. Counts of (first, second) and (second, third) token
face a chi-squared test each. Seeds are fixed; over the choice of seeds each comparison would fail a
correct engine once in 10,000 times (``ALPHA``). That the rules are exact is proved in
``test_rejection.py``; what is shown here is that the engine applies them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from drafters.model.model_drafter import SmallModelDrafter
from drafters.tree import DraftTree, chain
from engine.request.params import (
    GenerationRequest,
    SamplingParams,
    SpeculativeParams,
    VerificationName,
)
from engine.sampling.noise import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, step_key
from engine.sampling.state import SamplingState
from worlds.drawing_drafter import DrawingDrafter, as_mapping
from worlds.engine_harness import DictatedCost, Driver, Setup, drafting, request
from worlds.sampled_rows import RowGroup, verify_step
from worlds.sampling_oracle import new_state
from worlds.table_model import TableModel
from worlds.verified_streams import (
    ALPHA,
    CASES,
    NUM_REQUESTS,
    PROMPT,
    TARGET,
    VOCAB,
    next_probs,
    p_values,
    run_many,
)

pytestmark = pytest.mark.slow

DRAFT_PROBS = torch.softmax(
    torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)).double(), -1
).tolist()


def new_drafter(name: str) -> DrawingDrafter:
    wrap = {"wrap": as_mapping} if "nucleus" in name else {}
    return DrawingDrafter(DRAFT_PROBS, CASES[name][1], **wrap)


STAND_CHAIN = drafting("stand", num_tokens=2, share=True)
STAND: dict[str, tuple[VerificationName, SpeculativeParams]] = {
    "chain": ("rejection", STAND_CHAIN),
    "block": ("block", STAND_CHAIN),
    "tree": ("rejection", drafting("stand", num_tokens=8, width=3, share=True)),
    "goodput_tree": ("rejection", drafting("stand", "goodput", width=3, share=True)),
}


def run(
    name: str,
    verification: VerificationName,
    speculation: SpeculativeParams,
    cost: DictatedCost,
    **setup: Any,
) -> Driver:
    sampling = replace(CASES[name][2], max_tokens=3)
    speculation = replace(speculation, verification=verification)
    core = TARGET.core(Setup(num_blocks=1024, cost=cost, prefix_cache=False, **setup))
    return run_many(core, PROMPT, sampling, speculation)


def sample(name: str, drafter: DrawingDrafter) -> Driver:
    verification, _, _, speculation = CASES[name]
    drafters = {"drawing": drafter}
    cost = DictatedCost(row_seconds=0.02)
    return run(name, verification, speculation, cost, drafters=drafters)


@cache
def sampled(name: str) -> Driver:
    return sample(name, new_drafter(name))


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_target(name: str) -> None:
    driver = sampled(name)
    assert min(p_values(name, driver)) > ALPHA
    drafted = list(driver.drafted.values())
    for at in (0, 1):
        assert NUM_REQUESTS / 8 < sum(flags[at] for flags in drafted) < NUM_REQUESTS


@pytest.mark.parametrize("name", STAND)
def test_texts_follow_the_target_where_the_stand_drafts(name: str) -> None:
    """Requests share its table, so that most are drafted from what others were told."""
    driver = run(name, *STAND[name], DictatedCost(row_seconds=1e-4), max_num_seqs=32)
    assert min(p_values(name, driver)) > ALPHA
    assert sum(sum(flags) for flags in driver.drafted.values()) > NUM_REQUESTS / 2


def test_the_test_sees_draft_probs_that_are_not_those_drawn_from() -> None:
    drafter = new_drafter("chain")
    drafter.claims = [[1 / VOCAB] * VOCAB] * VOCAB
    assert min(p_values("chain", sample("chain", drafter))) < ALPHA


KNOWN = torch.tensor([7, 2, 12, 5, 14, 0, 8, 9, 13, 6])
"""The target's ids of a draft's own, whose vocabulary lacks the others."""
REDUCED: dict[str, tuple[str, VerificationName, int, int, int]] = {
    # of CASES, whose sampling it is; nodes, width, and how many tokens a forward drafts
    "chain": ("chain", "rejection", 2, 1, 1),
    "block": ("block", "block", 2, 1, 1),
    "tree": ("tree", "rejection", 6, 3, 1),
    "nucleus_chain": ("nucleus_chain", "rejection", 2, 1, 1),
    "nucleus_block": ("nucleus_block", "block", 2, 1, 1),
    "products_chain": ("chain", "block", 2, 1, 2),
    "products": ("tree", "rejection", 6, 3, 2),
    "nucleus_products": ("nucleus_chain", "rejection", 5, 2, 2),
}


def reduced(name: str, token_map: torch.Tensor) -> Driver:
    case, verification, num_tokens, width, num_parallel = REDUCED[name]
    generator = torch.Generator().manual_seed(6)
    tables = 1.5 * torch.randn(num_parallel, VOCAB, len(KNOWN), generator=generator)
    drafters = {"small_model": SmallModelDrafter(TableModel([*tables], token_map))}
    wanted = drafting("small_model", num_tokens=num_tokens, width=width, min_confidence=0.0)
    return run(case, verification, wanted, DictatedCost(row_seconds=1e-4), drafters=drafters)


@pytest.mark.parametrize("name", REDUCED)
def test_texts_follow_the_target_where_drafts_are_of_a_part_of_its_vocabulary(name: str) -> None:
    """Drafted one after another, and position by position."""
    driver = reduced(name, KNOWN)
    assert min(p_values(REDUCED[name][0], driver)) > ALPHA
    accepted: set[int] = set()
    for request_id, flags in driver.drafted.items():
        pairs = zip(driver.token_ids[request_id], flags, strict=True)
        accepted |= {token for token, was_drafted in pairs if was_drafted}
        assert driver.finishes[request_id].speculative.num_failed_drafts == 0
    assert len(accepted) > 3
    assert accepted <= {*KNOWN.tolist()}
    written = {token for text in driver.token_ids.values() for token in text}
    assert written - {*KNOWN.tolist()}, "what drafts do not know is written all the same"
    for at in (0, 1):
        assert sum(flags[at] for flags in driver.drafted.values()) > NUM_REQUESTS / 20


@pytest.mark.parametrize("name", ["chain", "nucleus_chain", "nucleus_block"])
def test_a_first_draft_is_accepted_with_one_minus_the_total_variation(name: str) -> None:
    """Blocks of two keep at least as much: a second draft may save the first."""
    target = next_probs(CASES[name][2], ())
    overlap = sum(min(pair) for pair in zip(target, DRAFT_PROBS[PROMPT[-1]], strict=True))
    accepted = sum(flags[0] for flags in sampled(name).drafted.values())
    deviation = (NUM_REQUESTS * overlap * (1 - overlap)) ** 0.5
    if CASES[name][0] == "block":
        assert accepted > NUM_REQUESTS * overlap - 5 * deviation
    else:
        assert abs(accepted - NUM_REQUESTS * overlap) < 5 * deviation


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_greedy_requests_write_what_they_would_alone(verification: VerificationName) -> None:
    drafter = DrawingDrafter(DRAFT_PROBS, [1, 1, 1])
    speculation = replace(drafting("drawing", num_tokens=3), verification=verification)
    greedy = SamplingParams(max_tokens=20, temperature=0)
    setup = Setup(drafters={"drawing": drafter})
    driver = Driver(TARGET.core(setup)).run(request("r", PROMPT, greedy, speculation))
    plain = Driver(TARGET.core(Setup())).run(request("r", PROMPT, greedy, drafting("none")))
    assert driver.token_ids == plain.token_ids
    assert {ask.sampling.verification for asks in drafter.asks for ask in asks} == {"match"}


# --- streams ---


def new_request(verification: VerificationName, **sampling: float) -> SamplingState:
    params = GenerationRequest(
        "r",
        (0, 1, 2),
        SamplingParams(max_tokens=99, **sampling),  # type: ignore[arg-type]
        SpeculativeParams(verification=verification),
    )
    return SamplingState(params, (), VOCAB, 1000)


def test_draft_noise_is_new_in_every_step_that_emits() -> None:
    state = new_request("rejection")
    keys = [state.draft_sampling().key]
    state.append([])  # a prompt chunk, or one recomputed after preemption
    assert state.draft_sampling().key == keys[0]
    for _ in range(3):
        state.append([5])
        keys.append(state.draft_sampling().key)
    assert len({*keys, state.key}) == 5
    sampling = state.draft_sampling()
    assert sampling.noise(7, [1, 2]) != new_request("match").draft_sampling().noise(7, [1, 2])


def test_no_two_draws_of_a_request_share_a_key() -> None:
    streams = (DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM)
    keys = {step_key(key, s, step) for key in range(-3, 3) for s in streams for step in range(50)}
    assert len(keys) == 6 * 3 * 50


# --- one step ---


def test_a_step_serves_every_verification_and_keeps_the_order() -> None:
    """Certain targets: then all verifications agree, and only the rows tell them apart."""
    logits = torch.full((10, VOCAB), -1e4)
    logits[torch.arange(10), [5, 6, 7, 5, 6, 7, 5, 8, 8, 9]] = 0.0
    drafted = DraftTree([5, 6], [-1, 0], [0, 0], {-1: torch.full((VOCAB,), 1 / VOCAB)})
    states = [new_request(name) for name in ("block", "match", "rejection", "block")]
    groups = [
        RowGroup(states[0], 0, drafted),
        RowGroup(states[1], 3, drafted),
        RowGroup(states[2], 6, DraftTree([4, 5], [-1, -1], [0, 0])),
        RowGroup(states[3], 9),
    ]
    outcomes = verify_step(logits, groups)
    assert [each.emitted_token_ids for each in outcomes] == [(5, 6, 7), (5, 6, 7), (5, 8), (9,)]
    assert [each.path for each in outcomes] == [(0, 1, 2), (0, 1, 2), (0, 2), (0,)]
    assert outcomes[2].row_token_ids == (5, -1, 8)


def test_stop_tokens_and_lengths_trim_accepted_drafts() -> None:
    logits = torch.full((4, VOCAB), -1e4)
    logits[torch.arange(4), [5, 6, 7, 8]] = 0.0
    params = SamplingParams(max_tokens=99, stop_token_ids=(6,))
    state = new_state(params, VOCAB)
    state.verification = "rejection"
    (outcome,) = verify_step(logits, [RowGroup(state, 0, chain([5, 6, 7]))])
    assert (outcome.emitted_token_ids, outcome.path, outcome.num_accepted) == ((5,), (0, 1), 3)
    assert (outcome.finish_reason, outcome.stop_token_id) == ("stop", 6)
