"""Acceptance estimates: labels, survival, priors, and proposals judged by later text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.estimator import AcceptanceEstimator
from drafters.tree import EMPTY, ROOT, DraftTree, chain


def labels_of(estimator, drafter, feature):
    """(accepted, all) labels of a feature, recovered from the shared prior without discount."""
    counts = estimator.priors(drafter).get(feature)
    return (0, 0) if counts is None else (counts.total, counts.weight)


def acceptance(view, feature, depth):
    """The estimate for a node of this feature at this depth, once its parent is accepted."""
    above, survival = [1.0, *view.survivals(chain([0] * depth, feature))][-2:]
    return survival / above


@pytest.fixture
def undiscounted():
    return AcceptanceEstimator(decay=1.0, shared_decay=1.0)


def test_twelve_refusals_end_drafting_and_hits_bring_it_back():
    view = AcceptanceEstimator().for_request("ngram")
    assert view.survivals(chain([1, 2], 3)) == [0.5, 0.25]
    for _ in range(12):
        view.label_against(chain([1, 2, 3]), [9])
    assert view.survivals(chain([1]))[0] < 0.1
    for _ in range(6):
        view.label_against(chain([1]), [1])
    assert view.survivals(chain([1]))[0] > 0.3


def test_a_drafter_says_what_is_believed_of_its_features_before_any_was_judged():
    view = AcceptanceEstimator(strength=4.0).for_request("head", (0.1, 0.9))
    assert view.survivals(chain([1, 2, 3], [1, 0, 2])) == pytest.approx([0.9, 0.09, 0.045])
    view.label_against(chain([1], 1), [9])
    shared = 4 * 0.9 / 5
    assert acceptance(view, 1, 1) == pytest.approx(4 * shared / 5)
    assert acceptance(view, 0, 1) == 0.1


def test_discounted_beta_over_the_shared_prior():
    estimator = AcceptanceEstimator(initial=0.5, strength=4.0, decay=0.9, shared_decay=0.8)
    view = estimator.for_request("d")
    for accepted in (True, False, True):
        view.label_against(chain([1]), [1 if accepted else 2])
    prior = (0.64 + 1 + 2) / (0.64 + 0.8 + 1 + 4)
    assert acceptance(estimator.for_request("d"), 0, 1) == pytest.approx(prior)
    own = (0.81 + 1 + 4 * prior) / (0.81 + 0.9 + 1 + 4)
    assert acceptance(view, 0, 1) == pytest.approx(own)
    assert acceptance(view, 0, 2) == pytest.approx(prior)


def test_a_new_request_starts_from_what_others_learned_of_the_same_drafter_only():
    estimator = AcceptanceEstimator()
    teacher = estimator.for_request("ngram")
    for _ in range(50):
        teacher.label_against(chain([1], 7), [1])
    assert acceptance(estimator.for_request("ngram"), 7, 3) > 0.9
    assert acceptance(estimator.for_request("ngram"), 8, 1) == 0.5
    assert acceptance(estimator.for_request("nasd"), 7, 1) == 0.5


trees = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=16).map(
    lambda nodes: DraftTree(
        list(range(len(nodes))),
        [pick % (i + 1) - 1 for i, (_, pick) in enumerate(nodes)],
        [feature for feature, _ in nodes],
    )
)


@given(trees, st.lists(st.tuples(trees, st.lists(st.integers(0, 9), max_size=5)), max_size=10))
def test_survival_is_a_product_along_the_path_and_never_grows_downward(tree, history):
    view = AcceptanceEstimator().for_request("d")
    for past, emitted in history:
        view.label_against(past, emitted)
    survivals, depths = view.survivals(tree), tree.depths()
    assert len(survivals) == len(tree)
    for i, parent in enumerate(tree.parents):
        above = 1.0 if parent == ROOT else survivals[parent]
        assert 0.0 < survivals[i] <= above
        assert survivals[i] == pytest.approx(above * acceptance(view, tree.features[i], depths[i]))


BRANCHED = DraftTree([1, 2, 3, 4, 5], [ROOT, 0, ROOT, 0, 2], [0, 1, 2, 3, 4])
"""1 under the root, 2 and 4 under it; 3 under the root, 5 under it."""


def test_only_nodes_whose_parent_was_reached_are_labelled(undiscounted):
    view = undiscounted.for_request("d")
    view.label_against(BRANCHED, [1, 4, 8])
    labels = [labels_of(undiscounted, "d", feature) for feature in range(5)]
    assert labels == [(1, 1), (0, 1), (0, 1), (1, 1), (0, 0)]


def test_verified_paths_give_the_same_labels_as_the_text(undiscounted):
    by_path, by_text = undiscounted.for_request("path"), undiscounted.for_request("text")
    for path, emitted in (([0, 1, 4], [1, 4, 8]), ([0], [9]), ([0, 3, 5], [3, 5, 0])):
        by_path.update(BRANCHED, path)
        by_text.label_against(BRANCHED, emitted)
    for feature in range(5):
        of_path = labels_of(undiscounted, "path", feature)
        assert of_path == labels_of(undiscounted, "text", feature)
        assert of_path[1] > 0


def test_an_ungranted_proposal_is_judged_depth_by_depth_over_later_steps(undiscounted):
    view = undiscounted.for_request("d")
    view.label_against(chain([1, 2, 3, 4], range(4)), [])
    assert labels_of(undiscounted, "d", 0) == (0, 0)
    view.label_against(EMPTY, [1])
    assert [labels_of(undiscounted, "d", f) for f in range(4)] == [(1, 1)] + [(0, 0)] * 3
    view.label_against(EMPTY, [2])
    view.label_against(EMPTY, [7])
    view.label_against(EMPTY, [4])
    assert [labels_of(undiscounted, "d", f) for f in range(4)] == [(1, 1), (1, 1), (0, 1), (0, 0)]


def test_one_proposal_waits_at_a_time_and_the_next_is_taken_when_it_is_judged(undiscounted):
    view = undiscounted.for_request("d")
    view.label_against(chain([1, 2, 3], [0, 1, 2]), [1])  # waits for 2
    view.label_against(chain([2, 3], [10, 11]), [2])  # labelled at once; its 3 is not kept
    view.label_against(EMPTY, [3])  # judges the first one
    assert [labels_of(undiscounted, "d", f) for f in (1, 2)] == [(1, 1), (1, 1)]
    assert [labels_of(undiscounted, "d", f) for f in (10, 11)] == [(1, 1), (0, 0)]
    view.label_against(chain([4, 5], [20, 21]), [4])
    view.label_against(EMPTY, [6])
    assert labels_of(undiscounted, "d", 21) == (0, 1)


def test_tables_are_bounded_for_deep_chains():
    view = AcceptanceEstimator().for_request("d")
    view.label_against(chain([1] * 500), [1] * 500)
    assert len(view._own) == 32
    assert acceptance(view, 0, 50) == pytest.approx(acceptance(view, 0, 32))


def test_of_a_chain_no_more_is_judged_likely_than_asked_for() -> None:
    estimates = AcceptanceEstimator().for_request("ngram")
    tree = chain([1, 2, 3, 4, 5, 6], [0] * 6)
    every = estimates.survivals(tree)
    assert every == pytest.approx([0.5**depth for depth in range(1, 7)])
    assert estimates.survivals(tree, 0.2) == every[:2]
    assert estimates.survivals(tree, 0.9) == every[:1]  # one is judged in any case
