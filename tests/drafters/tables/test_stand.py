"""STAND drafts what the target would draw, from what the target has said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import GREEDY, DraftRequest, DraftSampling, DraftShape, Observation
from drafters.tables.stand import LEAST_SHARE, StandDrafter, in_sampled_order, sampled_probs
from drafters.tables.template import DraftTemplate
from drafters.tree import EMPTY, ROOT, DraftTree
from engine.sampling.noise import gumbel_list, request_key
from worlds.sampled_rows import gumbel_scalar
from worlds.sampled_target import choose, decode, markov_probs, noise_of, sampling_of
from worlds.simulated_target import ask, node_paths

A, B = [0.6, 0.3, 0.1], [0.9, 0.1]


def taught(options: dict[str, int | bool] | None = None) -> StandDrafter:
    """After 1 2 comes 3, 4 or 5; after 2 3 comes 6 or 7; after 2 4 comes 8."""
    drafter = StandDrafter()
    drafter.open("r", [9], options or {}, "")
    for text, tokens, probs in (
        ([9, 1, 2], [3, 4, 5], A),
        ([9, 1, 2, 3], [6, 7], B),
        ([9, 1, 2, 4], [8], [1.0]),
    ):
        seen = Observation("r", [*text, 0], EMPTY, [0], [0], [0], [tokens], [probs])
        drafter.observe([seen])
    return drafter


@pytest.mark.parametrize("sampling", [GREEDY, DraftSampling(0.0, verification="rejection")])
def test_greedy_chain_takes_the_likeliest_and_a_tree_adds_the_others(
    sampling: DraftSampling,
) -> None:
    drafter = taught()
    assert list(ask(drafter, [5, 1, 2], sampling=sampling).token_ids) == [3, 6]
    tree = ask(drafter, [5, 1, 2], 8, DraftShape(3, 4), sampling)
    assert set(node_paths(tree)) == {(3,), (4,), (5,), (3, 6), (3, 7), (4, 8)}
    assert list(tree.token_ids[:2]) == [3, 6]
    assert tree.draft_probs == {}


def test_context_lengths_are_options() -> None:
    assert list(ask(taught({"min_ctx": 3}), [5, 1, 2]).token_ids) == []
    assert list(ask(taught({"min_ctx": 3}), [9, 1, 2]).token_ids) == [3, 6]
    assert list(ask(taught({"min_ctx": 1, "max_ctx": 1}), [7, 7, 2]).token_ids) == [3, 6]
    assert list(ask(taught({"min_ctx": 2}), [7, 7, 2]).token_ids) == []


def test_only_the_accepted_path_teaches() -> None:
    drafter = StandDrafter()
    drafter.open("r", [1, 2], {}, "")
    tree = DraftTree([3, 4, 5], [ROOT, ROOT, 1], [0, 0, 0])  # 3 and 4 5 were drafted
    rows, path, emitted = [4, 0, 5, 6], [0, 2, 3], [4, 5, 6]
    tops = [[4], [70], [5], [6]], [[1.0]] * 4
    drafter.observe([Observation("r", [1, 2, *emitted], tree, rows, path, emitted, *tops)])
    assert list(ask(drafter, [1, 2]).token_ids) == [4, 5, 6]
    assert list(ask(drafter, [2, 3]).token_ids) == []


def test_where_the_tables_are_right_every_draft_is_accepted() -> None:
    """The point of sharing noise: a drawn text is foreseen although it is drawn."""
    probs, drafter = markov_probs(4, context=2, sharpness=0.3), StandDrafter()
    drafter.open("r", [0, 1], {}, "")
    text, sampling = [0, 1], sampling_of(7, 0.9)
    decode(drafter, "r", text, probs, 400, sampling)
    emitted = decode(drafter, "r", text, probs, 400, sampling)
    assert sum(emitted) / len(emitted) > 8.5  # of 9
    other = sampling_of(8, 0.9)  # a draft that draws with other noise
    wrong = StandDrafter()
    wrong.open("r", [0, 1], {}, "")
    wrong._states["r"] = drafter._states["r"]
    (tree,) = wrong.propose([DraftRequest("r", text, 8, DraftShape(), other)])
    expected, start = list(text), len(text)
    for _ in tree.token_ids:
        expected.append(choose(probs(expected), len(expected), sampling))
    assert list(tree.token_ids) != expected[start:]


REJECTION = DraftSampling(0.8, noise=noise_of(4), verification="rejection")


def test_when_another_verifier_asks_the_distributions_drawn_from_are_attached() -> None:
    assert StandDrafter.info.samples
    tree = ask(taught(), [1, 5, 1, 2], 40, DraftShape(3, 4), REJECTION)
    paths = node_paths(tree)
    children: dict[int, list[int]] = {}
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        children.setdefault(parent, []).append(token)
    assert set(tree.draft_probs) == set(children)
    for parent, probs in tree.draft_probs.items():
        depth = 0 if parent == ROOT else len(paths[parent])
        assert sum(probs.values()) == pytest.approx(1)
        assert children[parent] == drawn_order(probs, 4 + depth)[: len(children[parent])]
    root = dict(zip([3, 4, 5], sampled_probs(A, REJECTION), strict=True))
    assert tree.draft_probs[ROOT] == pytest.approx(root)
    three = tree.draft_probs[paths.index((3,))]  # 6 and 7 are known; a recent token completes them
    assert set(three) == {6, 7, 2}
    assert three[2] < 0.001 < three[7] < three[6]


def drawn_order(probs: Mapping[int, float], position: int) -> list[int]:
    """Gumbel-top-k from the definition; the probabilities are tempered already."""
    noise = dict(zip(probs, REJECTION.noise(position, list(probs)), strict=True))
    return sorted(probs, key=lambda token: -(math.log(probs[token]) + noise[token]))


def test_a_drawn_trees_shape_does_not_depend_on_what_was_drawn() -> None:
    """Policies grant by the shape; if it knew the draw, rejection would be biased."""
    shapes, tokens = set(), set()
    for seed in range(40):
        sampling = DraftSampling(1.0, noise=noise_of(seed), verification="rejection")
        tree = ask(taught(), [1, 5, 1, 2], 24, DraftShape(3, 4), sampling)
        shapes.add((tuple(tree.parents), tuple(tree.features)))
        tokens.add(tuple(tree.token_ids))
        assert len(tree) == 24
    assert len(shapes) == 1
    assert len(tokens) > 20


def test_a_drawn_chain_attaches_its_distributions_too() -> None:
    sampling = DraftSampling(0.8, noise=noise_of(1), verification="rejection")
    tree = ask(taught(), [5, 1, 2], 8, DraftShape(), sampling)
    assert set(tree.draft_probs) == set(range(-1, len(tree) - 1))
    assert all(tree.token_ids[at + 1] in probs for at, probs in tree.draft_probs.items())


def test_features_tell_a_clear_lead_from_a_narrow_one_and_the_prompts_word() -> None:
    drafter = taught()
    narrow = ask(drafter, [5, 1, 2], 1).features[0]
    clear = ask(drafter, [5, 2, 3], 1).features[0]
    longer = ask(drafter, [9, 1, 2], 1).features[0]
    drafter.close("r")
    drafter.open("r", [1, 2, 3], {}, "")
    prompt = ask(drafter, [1, 2, 3, 1, 2], 1).features[0]
    assert len({narrow, clear, longer, prompt}) == 4
    tree = ask(taught(), [5, 1, 2], 8, DraftShape(3, 1))
    assert len(set(tree.features)) == 3


def test_a_template_file_decides_the_tree(tmp_path: Path) -> None:
    DraftTemplate([(0,), (1,), (1, 0)]).save(tmp_path / "t.json")
    drafter = StandDrafter(str(tmp_path / "t.json"))
    drafter.open("r", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], {}, "")
    tree = ask(drafter, [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 9, DraftShape(4, 9))
    assert set(node_paths(tree)) == {(4,), (3,), (3, 9)}  # of equal counts, the newer one first
    with pytest.raises(ValueError, match=r"none\.json"):
        StandDrafter(str(tmp_path / "none.json"))


PROBS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=10).map(
    lambda probs: sorted(probs, reverse=True)
)


@given(PROBS, st.floats(0.3, 2.0), st.integers(0, 99))
def test_order_is_that_of_the_verifiers_own_scores(
    probs: list[float], temperature: float, seed: int
) -> None:
    """The definition: largest ``log(prob) / T + g`` first, over what is drawn at all."""
    key, position = request_key(seed, 0), 40 + seed
    sampling = DraftSampling(temperature, noise=partial(gumbel_list, key), key=key)
    token_ids = [1000 + 7 * index for index in range(len(probs))]
    drawn = sampled_probs(probs, sampling)
    score = {
        token: math.log(prob) / temperature + gumbel_scalar(key, position, token)
        for token, prob in zip(token_ids, probs, strict=True)
    }
    expected = sorted(token_ids[: len(drawn)], key=lambda token: -score[token])
    assert in_sampled_order(token_ids, drawn, position, sampling)[0] == expected


@given(PROBS, st.floats(0.2, 2.0))
def test_what_is_drawn_is_the_tempered_distribution(probs: list[float], temperature: float) -> None:
    drawn = sampled_probs(probs, DraftSampling(temperature))
    tempered = [prob ** (1 / temperature) for prob in probs]
    kept = [each for each in tempered if each >= LEAST_SHARE * tempered[0] * (1 - 1e-9)]
    assert sum(drawn) == pytest.approx(1)
    assert abs(len(drawn) - len(kept)) <= 1  # one may lie on the border
    if len(drawn) == len(kept):
        assert drawn == pytest.approx([each / sum(kept) for each in kept])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (DraftSampling(1.0, top_k=2), [0.625, 0.375]),
        (DraftSampling(1.0, top_p=0.75), [0.625, 0.375]),
        (DraftSampling(1.0, top_p=0.5), [1.0]),
        (DraftSampling(1.0, min_p=0.5), [0.625, 0.375]),
        (DraftSampling(0.5, min_p=0.5), [1.0]),
        (DraftSampling(1.0), [0.5, 0.3, 0.2]),
        (DraftSampling(0.01), [1.0]),
    ],
)
def test_truncation_follows_the_request(sampling: DraftSampling, expected: list[float]) -> None:
    assert sampled_probs([0.5, 0.3, 0.2], sampling) == pytest.approx(expected)
