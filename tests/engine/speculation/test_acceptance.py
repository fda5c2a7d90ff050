"""Drawn drafts may tell the gamma policies little, and grants may not depend on their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import Observation
from drafters.estimator import AcceptanceEstimator
from drafters.tree import EMPTY, DraftTree, chain
from engine.request.params import SpeculativeParams
from engine.speculation.acceptance import Acceptance, SampledAcceptance, new_acceptance
from engine.speculation.drafting import check_sampled
from engine.speculation.gamma.policy import DraftCandidate
from worlds.engine_harness import DictatedCost
from worlds.gamma_cases import grants_of, load_of
from worlds.lanes import examples
from worlds.sampling_oracle import random_tree


def drawn() -> Acceptance:
    return new_acceptance(AcceptanceEstimator(), "fake", "rejection")


def observe(
    acceptance: Acceptance, tree: DraftTree, path: Sequence[int], num_emitted: int | None = None
) -> None:
    num_emitted = len(path) if num_emitted is None else num_emitted
    seen = Observation("r", [1], tree, [0] * (len(tree) + 1), path, [0] * num_emitted)
    acceptance.observe(tree, seen)


def trained(rng: random.Random) -> Acceptance:
    """Has seen trees of all shapes verified, with any outcome."""
    acceptance = drawn()
    for _ in range(rng.randrange(30)):
        tree = random_tree(rng, 6, 8)
        path = [0]
        for node, parent in enumerate(tree.parents):
            if parent + 1 == path[-1] and rng.random() < 0.5:
                path.append(node + 1)
        observe(acceptance, tree, path)
    return acceptance


def disguised(rng: random.Random, tree: DraftTree) -> DraftTree:
    """The same shape with other tokens and features."""
    tokens = rng.sample(range(1000), len(tree))
    return DraftTree(tokens, tree.parents, [rng.randrange(64) for _ in tokens])


@settings(max_examples=examples(60))
@given(st.randoms(use_true_random=False), st.sampled_from(["fixed", "target_rate", "goodput"]))
def test_grants_do_not_depend_on_the_tokens_and_keep_the_first_that_were_drawn(
    rng: random.Random, policy: str
) -> None:
    params = SpeculativeParams(
        draft_strategy="fake",
        adaptive_depth=policy,
        num_speculative_tokens=6,
        max_speculative_tokens=12,
    )  # type: ignore[arg-type]
    acceptance, tree = trained(rng), random_tree(rng, 6, 12)
    grants = []
    for shown in (tree, disguised(rng, tree)):
        candidate = DraftCandidate("r", params, shown, acceptance.survivals(shown), max_nodes=12)
        (granted,) = grants_of(DictatedCost(row_seconds=0.2), [candidate], load_of(1, None, 9))
        grants.append(list(granted.nodes))
    assert grants[0] == grants[1]
    kept = set(grants[0])
    for node in kept:
        parent = tree.parents[node]
        assert parent in kept or parent == -1
        earlier = {i for i in range(node) if tree.parents[i] == parent}
        assert earlier <= kept, "an earlier sibling was dropped"


def test_matched_drafts_are_told_apart_by_their_features() -> None:
    """The test above would catch it if drawn drafts were: grants would follow the token."""
    acceptance = new_acceptance(AcceptanceEstimator(), "fake", "match")
    assert type(acceptance) is Acceptance
    for _ in range(20):
        seen = Observation("r", [1], EMPTY, [7], [0], [7])
        acceptance.observe(chain([7], 1), seen)
        acceptance.observe(chain([8], 2), seen)
    assert acceptance.survivals(chain([3], 1)) > acceptance.survivals(chain([3], 2))


def test_labels_come_from_the_path_and_not_from_the_text() -> None:
    acceptance, tree = drawn(), chain([5, 5])
    before = acceptance.survivals(tree)[0]
    for _ in range(10):
        # Refused, though the token drawn instead has the same number.
        acceptance.observe(tree, Observation("r", [1], tree, [5, -1, -1], [0], [5]))
    assert acceptance.survivals(tree)[0] < before / 2
    for _ in range(40):
        observe(acceptance, tree, [0, 1, 2])
    first, second = acceptance.survivals(tree)
    assert before < second < first
    for _ in range(10):  # a trimmed run says nothing
        observe(acceptance, tree, [0, 1], num_emitted=1)
    assert acceptance.survivals(tree) == [first, second]


def test_siblings_are_known_by_rank_and_never_rise() -> None:
    acceptance = drawn()
    tree = DraftTree([1, 2, 3], [-1, -1, -1], [0, 0, 0])
    for path in ([0, 1], [0, 1], [0, 3], [0, 3], [0, 3], [0, 3]) * 4:
        observe(acceptance, tree, path)
    first, second, third = acceptance.survivals(tree)
    assert second < first
    assert third == second, "taken more often, but granted no sooner"


def test_after_eight_proposals_in_vain_one_is_believed_in() -> None:
    acceptance, tree = drawn(), chain([1, 2])
    for _ in range(40):
        observe(acceptance, tree, [0])
    low = acceptance.survivals(tree)
    beliefs = []
    for _ in range(17):
        acceptance.observe(tree, Observation("r", [1], EMPTY, [0], [0], [0]))
        beliefs.append(acceptance.survivals(tree))
    assert [i for i, each in enumerate(beliefs) if each != low] == [7, 15]
    assert beliefs[7] == [0.5, 0.25]
    acceptance.observe(EMPTY, Observation("r", [1], EMPTY, [0], [0], [0]))
    observe(acceptance, tree, [0])
    assert acceptance.survivals(tree)[0] < 0.1


def test_verifications_share_no_counts() -> None:
    estimator = AcceptanceEstimator()
    tree = chain([1])
    for _ in range(30):
        observe(new_acceptance(estimator, "fake", "rejection"), tree, [0, 1])
    assert new_acceptance(estimator, "fake", "match").survivals(tree) == [0.5]
    assert new_acceptance(estimator, "fake", "block").survivals(tree) == [0.5]
    fresh = new_acceptance(estimator, "fake", "rejection")
    assert isinstance(fresh, SampledAcceptance)
    assert fresh.survivals(tree)[0] > 0.8


FORK = DraftTree([1, 2], [-1, -1], [0, 0], {-1: {1: 0.25, 2: 0.75}})


@pytest.mark.parametrize(
    ("tree", "verification"),
    [
        (FORK, "rejection"),
        (replace(FORK, draft_probs={-1: torch.ones(4) / 4}), "rejection"),
        (replace(chain([1, 2]), draft_probs={0: {3: 1.0}}), "block"),
        (replace(FORK, draft_probs={-1: {9: 7.0}}), "match"),
    ],
)
def test_sound_distributions_pass(tree: DraftTree, verification: str) -> None:
    check_sampled(tree, verification, 4)
    with pytest.raises(ValueError, match="block verification is for chains"):
        check_sampled(FORK, "block", 4)


@pytest.mark.parametrize(
    ("draft_probs", "part"),
    [
        ({-1: {1: 0.5}}, "no distribution"),
        ({-1: {1: 1.5, 2: -0.5}}, "no distribution"),
        ({-1: {1: 0.5, 4: 0.5}}, "out of the vocabulary"),
        ({-1: {}}, "no distribution"),
        ({2: {1: 1.0}}, "does not exist"),
        ({-1: torch.ones(5) / 5}, "have shape"),
        ({-1: torch.ones(1, 4) / 4}, "have shape"),
    ],
)
def test_unsound_distributions_do_not(draft_probs: dict[int, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        check_sampled(replace(FORK, draft_probs=draft_probs), "rejection", 4)


def test_a_chain_that_ended_early_is_granted_as_if_it_had_not() -> None:
    acceptance = drawn()
    shown = [acceptance.granted_from(chain([7] * length), 4) for length in (1, 2, 4)]
    assert shown == [shown[0]] * 3
    assert len(shown[0]) == 4
    assert acceptance.granted_from(EMPTY, 4) == EMPTY
    assert acceptance.granted_from(FORK, 4) is FORK
    matched = new_acceptance(AcceptanceEstimator(), "fake", "match")
    assert matched.granted_from(chain([7]), 4) == chain([7])


def test_a_drafter_that_says_how_likely_its_nodes_are_is_believed_and_teaches_nothing() -> None:
    estimator = AcceptanceEstimator()
    acceptance = new_acceptance(estimator, "sure", "match")
    tree = DraftTree([1, 2], [-1, 0], [0, 0], survivals=[0.75, 0.5])
    assert acceptance.survivals(tree) == [0.75, 0.5]
    acceptance.observe(tree, Observation("r", [9, 1], EMPTY, [1], [0], [1]))
    assert not estimator.priors("sure")
    assert not acceptance.is_waiting
