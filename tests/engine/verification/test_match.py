"""Verification by matching: the walk, the trimming, and texts that do not depend on drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.tree import EMPTY, DraftTree, chain
from engine.request.outcome import Outcome
from engine.request.params import SamplingParams
from worlds.lanes import examples
from worlds.sampled_rows import RowGroup, verify_all
from worlds.sampling_oracle import ToyModel, new_state, random_tree

ENDLESS = SamplingParams(max_tokens=1000, temperature=0)
FORK = DraftTree([5, 6, 7, 8, 9], [-1, 0, -1, 2, 2], [0] * 5)
"""Root -> 5 -> 6 and root -> 7 -> {8, 9}: rows 1, 2 and 3, 4, 5."""


def outcome_of(
    tree: DraftTree,
    row_token_ids: Sequence[int],
    params: SamplingParams = ENDLESS,
    eos: Sequence[int] = (),
    num_output: int = 0,
    max_model_len: int = 10**6,
) -> Outcome:
    state = new_state(params, 100, eos=eos, max_model_len=max_model_len)
    state.append([50] * num_output)
    (outcome,) = verify_all([RowGroup(state, 0, tree)], row_token_ids)
    return outcome


# --- the walk ---


@pytest.mark.parametrize(
    ("targets", "path", "emitted"),
    [
        ([5, 6, 1, 8, 2, 3], (0, 1, 2), (5, 6, 1)),
        ([7, 6, 1, 9, 2, 3], (0, 3, 5), (7, 9, 3)),
        ([7, 6, 1, 6, 2, 3], (0, 3), (7, 6)),
        ([8, 6, 1, 8, 2, 3], (0,), (8,)),
    ],
)
def test_a_tree_is_walked_down_the_branch_that_the_target_takes(
    targets: list[int], path: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    outcome = outcome_of(FORK, targets)
    assert (outcome.path, outcome.emitted_token_ids) == (path, emitted)
    assert outcome.num_accepted == len(path) - 1
    assert outcome.drafted == (True,) * (len(path) - 1) + (False,)


@given(st.randoms(use_true_random=False))
def test_the_path_is_the_longest_on_which_target_and_tree_agree(rng: random.Random) -> None:
    tree = random_tree(rng, 3, 12)
    targets = [rng.randrange(3) for _ in range(1 + len(tree))]
    paths: dict[int, tuple[int, ...]] = {-1: (0,)}
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if parent in paths and targets[parent + 1] == token:
            paths[node] = (*paths[parent], node + 1)
    longest = max(paths.values(), key=len)
    outcome = outcome_of(tree, targets)
    assert outcome.path == longest
    assert outcome.emitted_token_ids == tuple(targets[row] for row in longest)
    assert outcome.row_token_ids == tuple(targets)
    assert outcome.finish_reason is None


# --- trimming ---

CHAIN, AGREED = chain([1, 2, 3]), [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "eos", "emitted", "reason", "stop_token_id"),
    [
        ({}, (2,), [1], "stop", 2),
        ({}, (1,), [], "stop", 1),
        ({"stop_token_ids": (4,)}, (), [1, 2, 3], "stop", 4),
        ({"stop_token_ids": (3,)}, (2, 4), [1], "stop", 2),
        ({"stop_token_ids": (3,), "ignore_eos": True}, (2,), [1, 2], "stop", 3),
        # A stop token beyond the length is not seen.
        ({"max_tokens": 1}, (2,), [1], "length", None),
        ({"max_tokens": 1}, (1,), [], "stop", 1),
        ({"min_tokens": 2}, (2,), [1, 2, 3, 4], None, None),
        ({"min_tokens": 2}, (3,), [1, 2], "stop", 3),
    ],
)
def test_what_ends_a_run_and_belongs_to_none_of_it(
    changes: dict[str, Any],
    eos: tuple[int, ...],
    emitted: list[int],
    reason: str | None,
    stop_token_id: int | None,
) -> None:
    outcome = outcome_of(CHAIN, AGREED, replace(ENDLESS, **changes), eos=eos)
    assert list(outcome.emitted_token_ids) == emitted
    assert (outcome.finish_reason, outcome.stop_token_id) == (reason, stop_token_id)
    num_drafts = min(len(emitted), 3)
    assert outcome.path == tuple(range(num_drafts + 1))
    assert (outcome.num_accepted, len(outcome.path) - 1) == (3, num_drafts)
    assert outcome.drafted == (True,) * num_drafts + (False,) * (len(emitted) - num_drafts)


@pytest.mark.parametrize("left", [1, 2, 3, 4, 5])
def test_max_tokens_cuts_the_run(left: int) -> None:
    outcome = outcome_of(CHAIN, AGREED, replace(ENDLESS, max_tokens=10), num_output=10 - left)
    assert outcome.emitted_token_ids == tuple(AGREED[:left])
    assert len(outcome.path) == min(left, 3) + 1
    assert outcome.finish_reason == ("length" if left <= 4 else None)
    assert outcome.num_accepted == 3


def test_max_model_len_counts_the_prompt() -> None:
    """The prompt has three tokens: two more fit into five."""
    outcome = outcome_of(CHAIN, AGREED, max_model_len=5)
    assert (outcome.emitted_token_ids, outcome.finish_reason) == ((1, 2), "length")


# --- drafts change when tokens come, never which ---


def stream(
    model: ToyModel, params: SamplingParams, prompt: list[int], rng: random.Random | None
) -> tuple[list[int], str | None, int | None, int]:
    """Returns a request's text, with random drafts if ``rng`` is given, how it ended, and the steps."""
    state = new_state(params, model.vocab_size, prompt, eos=(0,))
    text, num_steps = list(prompt), 0
    while True:
        tree = model.likely_tree(rng, text[-1], 9) if rng else EMPTY
        outcome = model.step(state, text, tree)
        num_steps += 1
        if outcome.finish_reason:
            return text, outcome.finish_reason, outcome.stop_token_id, num_steps


STREAMS = [
    SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    for seed in range(5)
    for temperature, top_p in [(1.0, 1.0), (0.7, 1.0), (1.3, 0.9), (0.0, 1.0)]
]


@settings(max_examples=examples(60))
@given(
    params=st.sampled_from(STREAMS),
    edited=st.booleans(),
    model_seed=st.integers(0, 5),
    rng=st.randoms(use_true_random=False),
)
def test_a_stream_is_the_same_with_and_without_drafts(
    params: SamplingParams, edited: bool, model_seed: int, rng: random.Random
) -> None:
    params = replace(params, max_tokens=rng.randrange(1, 16), ignore_eos=rng.random() < 0.3)
    if edited:
        params = replace(
            params,
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logit_bias={rng.randrange(20): 2.0},
            min_tokens=rng.randrange(8),
            bad_words_token_ids=((rng.randrange(20),), (rng.randrange(20), rng.randrange(20))),
        )
    model = ToyModel(20, model_seed)
    prompt = [rng.randrange(20) for _ in range(3)]
    plain = stream(model, params, prompt, None)
    drafted = stream(model, params, prompt, rng)
    assert drafted[:3] == plain[:3]
    assert drafted[3] <= plain[3]
