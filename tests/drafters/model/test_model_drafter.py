"""Drafters with a model: what they feed, what they propose, and that no row is ever taken for another.

``FakeDraftModel`` fails at once where a row attends to something else than its own text's rows.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftSampling, DraftShape, Observation
from drafters.model.growth import NUM_LEVELS, NUM_RANKS, DraftGrowth, feature_of
from drafters.model.model_drafter import Calibration, ModelDrafter
from drafters.model.protocol import Candidates
from drafters.tree import ROOT, DraftTree, chain, chain_length
from worlds.lanes import examples
from worlds.model_world import BLOCK_SIZE, FakeDraftModel, World, ranking, target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def run(world: World, num_steps: int) -> World:
    for _ in range(num_steps):
        world.step()
    return world


def first_draft(model: FakeDraftModel, **asked: Any) -> DraftTree:
    """The draft behind PROMPT alone."""
    world = World(model)
    request = world.add("r", PROMPT, **asked)
    world.step()
    return request.trees[0]


def best_chain(length: int) -> list[int]:
    """The draft model's own likeliest tokens after the prompt."""
    text = list(PROMPT)
    for _ in range(length):
        text.append(ranking(text)[0])
    return text[len(PROMPT) :]


def greedy_text(prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(target(text))
    return text


# --- chains ---


def test_a_chain_is_what_the_model_would_write() -> None:
    tree = first_draft(FakeDraftModel(confidences=(1.0,)), max_nodes=5)
    assert list(tree.token_ids) == best_chain(5)
    assert tree.is_chain()


def test_the_first_round_feeds_the_prompt_and_later_steps_only_what_is_missing() -> None:
    model = FakeDraftModel(confidences=(1.0,))
    world = World(model)
    request = world.add("r", PROMPT, max_nodes=3)
    world.step()
    assert [len(call[0].token_ids) for call in model.calls] == [len(PROMPT), 1, 1]
    for _ in range(12):
        model.calls.clear()
        before = request.num_accepted
        world.step()
        fed = len(model.calls[0][0].token_ids)
        assert fed <= 2, "one row for the target's token, one for a fully accepted draft's last"
        if request.num_accepted - before < 3:
            continue
        model.calls.clear()
        world.step()
        assert len(model.calls[0][0].token_ids) == 2
        return
    raise AssertionError("no draft was accepted in full")


def test_steps_without_a_draft_are_caught_up_in_one_forward() -> None:
    model = FakeDraftModel()
    world = World(model)
    world.add("r", PROMPT)
    world.step()
    for _ in range(5):
        world.step(speculate=False)
    model.calls.clear()
    world.step()
    assert 5 <= len(model.calls[0][0].token_ids) <= 7


def test_a_long_lag_is_caught_up_in_pieces_and_nothing_is_drafted_meanwhile() -> None:
    model = FakeDraftModel(max_catch_up_rows=8, confidences=(1.0,))
    world = World(model, num_blocks=80)
    request = world.add("long", list(range(10)) * 4)
    short = world.add("short", PROMPT[:3])
    while not request.trees or not len(request.trees[-1]):
        model.calls.clear()
        world.step()
        assert sum(len(rows.token_ids) for rows in model.calls[0]) <= 8
        assert len(request.trees) < 12
    assert len(request.trees) > 5
    assert all(len(tree) for tree in short.trees), "neighbours that are caught up draft on"


def test_rounds_run_only_those_that_want_the_depth() -> None:
    model = FakeDraftModel(confidences=(1.0,))
    world = World(model)
    for name, depth in (("a", 1), ("b", 4), ("c", 2)):
        world.add(name, PROMPT[: 4 + depth], depth=depth)
    world.step()
    ran = [sorted(rows.ask.request_id for rows in call) for call in model.calls]
    assert ran == [["a", "b", "c"], ["b", "c"], ["b"], ["b"]]


def test_no_position_beyond_the_models_is_used() -> None:
    model = FakeDraftModel(max_len=len(PROMPT) + 3, confidences=(1.0,))
    world = World(model)
    request = world.add("r", PROMPT, max_nodes=6)
    run(world, 6)
    assert len(request.trees[0]) == 3
    assert len(request.trees[-1]) == 0
    last = max(rows.base + len(rows.token_ids) for call in model.calls for rows in call)
    assert last <= len(PROMPT) + 3


# --- how much ---


def test_min_confidence_ends_a_chain_where_its_survival_falls_below() -> None:
    world = World(FakeDraftModel(confidences=(0.7,)))
    request = world.add("r", PROMPT, max_nodes=9, options={"min_confidence": 0.3})
    other = world.add("s", PROMPT[:5], max_nodes=9, options={"min_confidence": 0.0})
    world.step()
    # .7, .49, .343 are run on; their last child has .24 and is not.
    assert len(request.trees[0]) == 4
    assert len(other.trees[0]) == 9


def test_what_cannot_be_verified_is_not_run_on() -> None:
    world = World(FakeDraftModel(confidences=(0.7,)))
    request = world.add("r", PROMPT, max_nodes=9, options={"min_confidence": 0.0})
    world.row_prices = (0.3 / 0.7,)
    world.step()
    assert len(request.trees[0]) == 4


def test_a_round_has_to_bring_more_than_the_engine_writes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(FakeDraftModel(confidences=(0.9,)))
    monkeypatch.setattr(world.drafter._times, "expect", lambda _: 0.01)
    request = world.add("r", PROMPT, max_nodes=8, options={"min_confidence": 0.0})
    lengths = []
    for rate in (0.0, 20.0, 45.0, 1000.0):
        world.tokens_per_second = rate
        world.step()
        lengths.append(len(request.trees[-1]))
    assert lengths[0] == 8
    assert 8 >= lengths[1] >= lengths[2] >= lengths[3] == 1
    assert lengths[1] > 1


def test_calibration_learns_nothing_of_steps_that_were_missed() -> None:
    calibration = Calibration()
    before = calibration.mean, calibration.acceptance(0, 0.9)
    seen = Observation.of_missed("r", [1, 2, 3, 4], 3)
    calibration.learn(seen.tree, seen.path)
    assert list(seen.tree.token_ids) == [2, 3]
    assert (calibration.mean, calibration.acceptance(0, 0.9)) == before


def test_calibration_follows_what_was_accepted() -> None:
    calibration = Calibration()
    feature = feature_of(0.9, 0)
    assert calibration.acceptance(feature, 0.9) == pytest.approx(0.9)
    for _ in range(200):
        calibration.learn(chain([1, 2], feature), [0])
    assert calibration.acceptance(feature, 0.9) < 0.1
    assert calibration.mean < 0.1
    for _ in range(400):
        calibration.learn(chain([1, 2], feature), [0, 1, 2])
    assert calibration.acceptance(feature, 0.9) > 0.8


def test_the_mean_is_how_often_any_child_is_accepted() -> None:
    calibration = Calibration()
    features = [feature_of(0.5, 0), feature_of(0.3, 1)]
    for _ in range(200):
        calibration.learn(DraftTree([1, 2], [ROOT, ROOT], features), [0, 2])
    assert calibration.mean > 0.9
    assert calibration.acceptance(features[0], 0.5) < 0.1


def test_a_level_brings_what_all_its_rows_do_less_what_they_put_out_of_a_full_tree() -> None:
    shape = DraftShape(width=3, depth=8)
    growth, full = (
        DraftGrowth(DraftRequest("r", PROMPT, most, shape), 0.0, 8, lambda _, sure: sure)
        for most in (8, 3)
    )
    for each in (growth, full):
        each.add_level([ROOT], [Candidates([1, 2, 3], [0.5, 0.25, 0.125])])
    assert growth.expected_gain(0.8) == pytest.approx(0.8 * (0.5 + 0.25 + 0.125))
    # Its rows bring 0.4 and 0.2: the one puts out 0.125, the other would put out 0.25.
    assert full.frontier == [0, 1]
    assert full.expected_gain(0.8) == pytest.approx(0.4 - 0.125)


def test_a_level_brings_no_more_than_its_rows_cost_beside_those_that_are_likelier() -> None:
    shape, prices = DraftShape(width=3, depth=8), (0.0, 0.05, 0.3)
    ask = DraftRequest("r", PROMPT, 8, shape, row_prices=prices)
    growth = DraftGrowth(ask, 0.0, 8, lambda _, sure: sure)
    growth.add_level([ROOT], [Candidates([1, 2, 3], [0.5, 0.25, 0.125])])
    # 0.4 beside one node that is likelier, 0.2 beside two, 0.1 beside all three.
    assert growth.expected_gain(0.8) == pytest.approx(0.4 - 0.05)


def test_what_a_draft_model_thinks_is_believed_before_anything_was_judged() -> None:
    assert len(ModelDrafter.initial_acceptance) == NUM_LEVELS * NUM_RANKS
    for sure in (0.0, 0.07, 0.33, 0.96, 1.0):
        for rank in range(NUM_RANKS):
            assert abs(ModelDrafter.initial_acceptance[feature_of(sure, rank)] - sure) <= 0.05


def test_features_tell_sure_from_unsure_and_stay_within_what_estimators_keep() -> None:
    features = {feature_of(step / 100, rank) for step in range(101) for rank in range(6)}
    assert features == set(range(NUM_LEVELS * NUM_RANKS))
    assert len(features) + NUM_RANKS <= 64


# --- trees ---


def test_a_tree_keeps_the_likeliest_nodes_and_its_best_chain_comes_first() -> None:
    model = FakeDraftModel(confidences=(0.6, 0.3, 0.05))
    tree = first_draft(model, width=3, max_nodes=7, options={"min_confidence": 0.0})
    assert len(tree) == 7
    assert max(tree.parents.count(parent) for parent in set(tree.parents)) >= 2
    length = chain_length(tree.parents)
    assert length >= 3
    assert length - 1 not in tree.parents[length:]
    assert list(tree.token_ids[:length]) == best_chain(length)


def test_a_tree_that_cannot_get_better_is_not_grown_further() -> None:
    model = FakeDraftModel(confidences=(0.4, 0.4, 0.2))
    assert len(first_draft(model, width=3, max_nodes=2, options={"min_confidence": 0.0})) == 2
    assert len(model.calls) == 1


def test_calibration_never_lifts_a_younger_sibling_above_its_elder() -> None:
    ask = DraftRequest("r", [1], 4, DraftShape(2, 1))
    growth = DraftGrowth(ask, 0.0, 1, lambda feature, _: 0.9 if feature >= NUM_LEVELS else 0.2)
    growth.add_level([ROOT], [Candidates([5, 6], [0.6, 0.3])])
    assert growth.nodes.weights == [0.2, 0.2]
    assert growth.tree().token_ids == [5, 6]


def test_accepted_branches_are_fed_again_where_they_belong() -> None:
    world = World(FakeDraftModel(confidences=(0.5, 0.4, 0.1)))
    request = world.add("r", PROMPT, width=3, max_nodes=12, options={"min_confidence": 0.0})
    run(world, 20)
    assert request.token_ids == greedy_text(PROMPT, len(request.token_ids))
    assert request.num_accepted > request.num_steps, "more than one accepted per step"


# --- drawn drafts: nothing may be dropped for what was drawn ---


@pytest.mark.parametrize("width", [1, 3])
def test_drawn_drafts_come_whole_and_with_their_distributions(width: int) -> None:
    sampling = DraftSampling(temperature=1.0, key=5, verification="rejection")
    world = World(FakeDraftModel(confidences=(0.5, 0.5, 0.5)), sampling=sampling)
    request = world.add("r", PROMPT, width=width, max_nodes=7, options={"min_confidence": 0.2})
    run(world, 8)
    for tree in request.trees:
        assert set(tree.draft_probs) == set(tree.parents)
        for parent in set(tree.parents):
            siblings = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == parent]
            _, text = tree.draft_probs[parent]
            assert siblings == ranking(text)[: len(siblings)], "not in the order they were drawn"
            if parent >= 0:
                assert text[-1] == tree.token_ids[parent]
    world.model.calls.clear()
    world.step()
    num_drawn = sum(
        min(rows.num_candidates, 3) * rows.num_scored for call in world.model.calls for rows in call
    )
    assert len(request.trees[-1]) == min(7, num_drawn)


# --- whose rows ---


def test_a_prefix_that_others_committed_without_drafting_is_read_anew() -> None:
    model = FakeDraftModel()
    world = World(model)
    world.add("plain", PROMPT * 2, drafts=False)
    run(world, 2)
    world.remove("plain")
    request = world.add("r", PROMPT * 2)
    world.step()
    assert request.num_steps == 1
    assert world.pool.num_prefix_hits >= 4 * BLOCK_SIZE
    assert len(model.calls[0][0].token_ids) == len(PROMPT) * 2


def test_a_prefix_that_was_drafted_on_is_not_read_again_by_the_same_tenant() -> None:
    model = FakeDraftModel()
    world = World(model)
    world.add("first", PROMPT * 2)
    run(world, 2)
    world.remove("first")
    model.calls.clear()
    world.add("again", PROMPT * 2)
    world.add("stranger", PROMPT * 2, cache_salt="other")
    world.step()
    fed = {rows.ask.request_id: len(rows.token_ids) for rows in model.calls[0]}
    # The last block's end is open: its rows were written under another table.
    assert fed["again"] <= BLOCK_SIZE
    assert fed["stranger"] == len(PROMPT) * 2


def test_requests_that_lack_the_same_shared_rows_take_turns() -> None:
    model = FakeDraftModel()
    world = World(model)
    world.add("plain", PROMPT * 2, drafts=False)
    run(world, 2)
    first, second = world.add("a", PROMPT * 2), world.add("b", [*PROMPT, *PROMPT[:9], 7])
    run(world, 3)
    assert sorted([len(first.trees[0]) > 0, len(second.trees[0]) > 0]) == [False, True]
    assert len(first.trees[1]) > 0
    assert len(second.trees[1]) > 0


def test_a_failed_forward_leaves_nothing_that_looks_written() -> None:
    model = FakeDraftModel()
    world = World(model)
    request = world.add("r", PROMPT)
    run(world, 3)
    model.fails = True
    with pytest.raises(RuntimeError, match="told to fail"):
        world.step()
    world.pool.free_draft("r")
    model.fails = False
    run(world, 5)
    assert request.token_ids == greedy_text(PROMPT, len(request.token_ids))


def test_a_model_on_the_targets_rows_feeds_what_is_not_committed_and_skips_prompts() -> None:
    model = FakeDraftModel(owns_rows=False, max_catch_up_rows=6)
    world = World(model)
    request = world.add("r", PROMPT, max_nodes=4)
    world.step()
    assert not model.calls, "the target is about to run the prompt itself"
    run(world, 10)
    assert {len(call[0].token_ids) for call in model.calls} == {1}
    assert request.num_accepted > 5


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "plain", "preempt", "add", "remove"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=examples(150))
@given(
    ACTIONS,
    st.booleans(),
    st.sampled_from([5, 64]),
    st.integers(12, 40),
    st.sampled_from(["match", "rejection"]),
)
def test_every_row_attends_to_its_own_text_whatever_happens(
    actions: list[tuple[str, int]], owns_rows: bool, budget: int, num_blocks: int, verification: str
) -> None:
    """Preemption, reuse, sharing, other requests' blocks, steps without drafts, trees and chains. Where
    levels are run ahead of what is read, the same is drafted."""
    sampling = DraftSampling(1.0, key=5, verification=verification)
    worlds = [
        World(FakeDraftModel(owns_rows, budget, runs_ahead=ahead), num_blocks, sampling)
        for ahead in (False, True)
    ]
    for world in worlds:
        act(world, actions)
        for request in world.requests.values():
            *before, last = request.token_ids
            assert request.num_steps == 0 or last == target(before)
    trees = [{name: each.trees for name, each in world.requests.items()} for world in worlds]
    assert trees[0] == trees[1]


def act(world: World, actions: list[tuple[str, int]]) -> None:
    for index, (action, number) in enumerate(actions):
        names = list(world.requests)
        if action == "add" or not names:
            if len(names) < 5:
                prompt = (PROMPT * 3)[: 5 + 3 * number]
                world.add(
                    f"r{index}",
                    prompt,
                    width=1 + number % 3,
                    depth=1 + number,
                    max_nodes=2 + 2 * number,
                    drafts=number != 4,
                    options={"min_confidence": 0.05 * number} if number != 4 else None,
                )
            continue
        name = names[number % len(names)]
        if action == "preempt":
            world.preempt(name)
        elif action == "remove":
            world.remove(name)
        else:
            world.step(names[number % len(names) :], speculate=action == "step")


# --- levels that are run ahead of what is read ---


def test_chains_are_run_to_their_full_depth_and_cut_when_they_are_read() -> None:
    model = FakeDraftModel(confidences=(0.7,), runs_ahead=True)
    world = World(model)
    request = world.add("r", PROMPT, max_nodes=9, options={"min_confidence": 0.3})
    other = world.add("s", PROMPT[:5], max_nodes=3, options={"min_confidence": 0.0})
    world.step()
    assert len(request.trees[0]) == 4
    assert len(other.trees[0]) == 3
    assert [len(call) for call in model.calls] == [2, 2, 2, *[1] * 6]


def test_levels_ahead_have_to_be_worth_it_by_what_is_accepted_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(FakeDraftModel(confidences=(0.9,), runs_ahead=True))
    monkeypatch.setattr(world.drafter._times, "expect", lambda _: 0.01)
    request = world.add("r", PROMPT, max_nodes=8, options={"min_confidence": 0.0})
    # The estimate before anything was verified: half of the nodes, so the next level brings 1/4, 1/8, ..
    for rate, length in ((0.0, 8), (15.0, 2), (1000.0, 1)):
        world.tokens_per_second = rate
        monkeypatch.setattr(world.drafter, "observe", lambda _: None)
        world.step()
        assert len(request.trees[-1]) == length


def test_levels_ahead_are_timed_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeDraftModel(confidences=(1.0,), runs_ahead=True))
    times: list[tuple[int, float]] = []
    monkeypatch.setattr(world.drafter._times, "observe", lambda *each: times.append(each))
    world.add("r", PROMPT, max_nodes=4)
    world.add("s", PROMPT[:5], max_nodes=3)
    world.step()
    assert times == [(2, 0.5), (2, 0.5), (1, 0.5)]
