"""States that heads keep: of rows not run yet, and behind full blocks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.states import BlockEnds, TextStates

BLANK = torch.zeros(2)


def states(first: int, end: int) -> torch.Tensor:
    """The state of position ``i`` is ``[i + 1, i + 1]``."""
    return torch.arange(first + 1.0, end + 1.0)[:, None].repeat(1, 2)


def before(kept: TextStates, position: int, count: int) -> list[float]:
    return [row[0].item() for row in kept.before(position, count)]


def test_states_are_read_before_rows_and_are_blank_where_unknown() -> None:
    kept = TextStates()
    assert kept.known == range(0)
    kept.add(4, states(4, 6))
    kept.add(6, states(6, 7))
    assert kept.known == range(4, 7)
    assert before(kept, 4, 5) == [0, 5, 6, 7, 0]
    assert before(kept, 0, 2) == [0, 0]


def test_a_gap_or_a_step_back_starts_anew() -> None:
    kept = TextStates()
    for first, end in ((0, 8), (9, 11), (4, 5)):
        kept.add(first, states(first, end))
        assert kept.known == range(first, end)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 30))
def test_what_the_next_row_reads_is_never_dropped(sizes: list[int], position: int) -> None:
    kept = TextStates()
    for size in sizes:
        end = kept.known.stop
        kept.add(end, states(end, end + size))
    end = kept.known.stop
    position = min(position, end)
    kept.drop(position)
    assert kept.known.stop == end
    assert before(kept, position, end - position + 1) == list(range(position, end + 1))


def test_long_stretches_keep_the_newest() -> None:
    kept = TextStates()
    for first in range(0, 6000, 1000):
        kept.add(first, states(first, first + 1000))
    assert kept.known.stop == 6000
    assert 4096 <= len(kept.known) < 5200


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_last_tokens_of_blocks_are_kept_under_their_ids(
    sizes: list[int], block_size: int, first: int
) -> None:
    table = list(range(99, -1, -1))
    kept = BlockEnds(100, block_size, BLANK)
    end = first
    for size in sizes:
        kept.keep(end, states(end, end + size), table)
        end += size
    for position in range(1, end + 1):
        state = kept.before(position, table)
        if position % block_size:
            assert state is None
        elif position > first:
            assert state is not None
            assert state.tolist() == [position, position]
    assert kept.before(0, table) is None
