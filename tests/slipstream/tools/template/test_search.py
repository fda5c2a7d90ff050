"""The search counts what decoding would accept, and keeps the best closed set of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import GREEDY, DraftSampling
from drafters.tables.template import DraftTemplate, RankPath
from slipstream.tools.template.search import (
    FIRST_DEPTH,
    ReplayText,
    best_paths,
    count_accepts,
    first_paths,
    search,
)
from worlds.sampled_target import choose, markov_probs, ranked, sampling_of

CANDIDATES = [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (1, 1), (2,)]


def counted(text: ReplayText, paths: list[RankPath]) -> tuple[dict[RankPath, int], int]:
    counts: dict[RankPath, int] = {}
    num_steps = count_accepts(text, frozenset(paths), counts)
    return counts, num_steps


def markov_text(
    vocab_size: int, num_tokens: int, sharpness: float, sampling: DraftSampling
) -> ReplayText:
    """A text drawn from a Markov chain of order 2, with all tokens ranked in every row."""
    probs, token_ids = markov_probs(vocab_size, context=2, sharpness=sharpness), [0, 1]
    tops, top_probs = [], []
    for _ in range(num_tokens):
        row = probs(token_ids)
        tops.append(ranked(row, vocab_size))
        top_probs.append([row[each] for each in tops[-1]])
        token_ids.append(choose(row, len(token_ids), sampling))
    return ReplayText([0, 1], token_ids[2:], tops, top_probs, sampling)


def test_the_first_tree_is_wide_and_deep_and_a_template_in_its_order() -> None:
    paths = first_paths()
    assert len(paths) == 625
    assert 13 < max(map(len, paths)) <= FIRST_DEPTH
    assert max(map(max, paths)) == 9
    DraftTemplate(paths[:256])  # raises where a parent or left sibling came later


def test_accepts_are_counted_along_the_decoding() -> None:
    """The prompt says 1 2 -> 3 -> 4; the target wants 3, then 9 before 4."""
    text = ReplayText(
        [1, 2, 3, 4, 1, 2],
        [3, 4, 1, 2],
        [[3, 4], [9, 4], [1, 5], [2, 5]],
        [[0.9, 0.1], [0.6, 0.4], [0.9, 0.1], [0.9, 0.1]],
    )
    # 1 2 -> 3 -> 4 -> 1 -> 2: all from the prompt, accepted in one step.
    paths = [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert counted(text, paths) == (dict.fromkeys(paths, 1), 1)
    # Two deep: 3 4 accepted and 1 added; then 2.
    assert counted(text, [(0,), (0, 0)]) == ({(0,): 2, (0, 0): 1}, 2)
    # Twice over, the second round knows that after 2 3 the likelier one is 9.
    rows = (text.token_ids, text.top_token_ids, text.top_probs)
    twice = ReplayText(text.prompt_token_ids, *([*each, *each] for each in rows))
    assert counted(twice, [(0,), (0, 1)]) == ({(0,): 4, (0, 1): 1}, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_the_texts_own_noise_first_ranks_win(temperature: float) -> None:
    """Where the tables know the target, the likeliest child under the noise is the text's token."""
    sampling = sampling_of(3, temperature) if temperature else GREEDY
    text = markov_text(6, 600, 1.0, sampling)
    counts, num_steps = counted(text, first_paths())
    assert counts[(0,)] > 10 * counts.get((1,), 0)
    assert num_steps < 100


COUNTS = st.fixed_dictionaries({}, optional={path: st.integers(0, 9) for path in CANDIDATES})


@given(COUNTS, st.integers(1, 8))
def test_kept_are_the_most_accepted_and_closed(counts: dict[RankPath, int], num: int) -> None:
    for path in CANDIDATES:  # what decoding counts: no child more often than its parent
        if len(path) > 1:
            counts[path] = min(counts.get(path, 0), counts.get(path[:-1], 0))
    kept = best_paths(counts, CANDIDATES, num)
    assert len(kept) == num
    DraftTemplate(kept)
    in_order = all(
        counts.get(path, 0) >= counts.get((*path[:-1], path[-1] + 1), 0) for path in CANDIDATES
    )
    if in_order:
        best = sorted((counts.get(path, 0) for path in CANDIDATES), reverse=True)[:num]
        assert [counts.get(path, 0) for path in kept] == best


def test_a_searched_template_decodes_its_own_texts_better_than_a_full_level() -> None:
    text = markov_text(8, 800, 2.0, sampling_of(5, 1.0))
    template, per_step = search([text], 8)
    assert len(template) == 8
    assert per_step > 2
    _, num_steps = counted(text, list(template.paths))
    _, num_steps_wide = counted(text, [(rank,) for rank in range(8)])
    assert num_steps < num_steps_wide


def test_without_texts_there_is_no_template() -> None:
    with pytest.raises(ValueError, match="no text"):
        search([], 8)
