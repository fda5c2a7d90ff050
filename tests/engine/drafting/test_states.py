"""States that heads keep: of rows not run yet, and behind full blocks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.states import BlockEnds, StateMemory, Stretch, TextStates

BLANK = torch.zeros(2)


def states(first: int, end: int) -> torch.Tensor:
    """The state of position ``i`` is ``[i + 1, i + 1]``."""
    return torch.arange(first + 1.0, end + 1.0)[:, None].repeat(1, 2)


def add(kept: TextStates, first: int, end: int) -> None:
    kept.add(first, kept.memory.add(states(first, end)))


def before(kept: TextStates, position: int, count: int) -> list[float]:
    return [row[0].item() for row in kept.before(position, count)]


def num_held(memory: StateMemory) -> int:
    return 0 if memory._rows is None else len(memory._rows) - len(memory._free)


def test_states_are_read_before_rows_and_are_blank_where_unknown() -> None:
    kept = TextStates(StateMemory())
    assert kept.known == range(0)
    add(kept, 4, 6)
    add(kept, 6, 7)
    assert kept.known == range(4, 7)
    assert before(kept, 4, 5) == [0, 5, 6, 7, 0]
    assert before(kept, 0, 2) == [0, 0]
    assert before(kept, 9, 2) == [0, 0]


def test_a_gap_or_a_step_back_starts_anew() -> None:
    kept = TextStates(StateMemory())
    for first, end in ((0, 8), (9, 11), (4, 5)):
        add(kept, first, end)
        assert kept.known == range(first, end)
        assert num_held(kept.memory) == end - first


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 30))
def test_what_the_next_row_reads_is_kept_and_no_more(sizes: list[int], position: int) -> None:
    kept = TextStates(StateMemory())
    for size in sizes:
        end = kept.known.stop
        add(kept, end, end + size)
    end = kept.known.stop
    position = min(position, end)
    kept.drop(position)
    assert kept.known == range(position - 1, end)
    assert before(kept, position, end - position + 1) == list(range(position, end + 1))


def test_long_stretches_keep_the_newest() -> None:
    kept = TextStates(StateMemory())
    for first in range(0, 6000, 1000):
        add(kept, first, first + 1000)
    assert kept.known == range(6000 - 4096, 6000)
    assert before(kept, 6000, 1) == [6000]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.booleans()), max_size=30))
def test_texts_share_memory_and_none_of_it_is_lost(turns: list[tuple[int, int, bool]]) -> None:
    memory = StateMemory()
    texts = [TextStates(memory) for _ in range(4)]
    for which, count, clears in turns:
        kept = texts[which]
        if clears:
            kept.clear()
        else:
            add(kept, kept.known.stop, kept.known.stop + count)
            kept.drop(kept.known.stop - count // 2)
        assert num_held(memory) == sum(len(each.known) for each in texts)
        for each in texts:
            if each.known:
                expected = [float(at + 1) for at in each.known]
                assert before(each, each.first + 1, len(each.known)) == expected
    for each in texts:
        each.clear()
    assert memory._rows is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 6))
def test_last_tokens_of_blocks_are_kept_under_their_ids(
    sizes: list[int], block_size: int, first: int
) -> None:
    """There are two texts at once; one is a position ahead of the other."""
    tables = list(range(99, -1, -1)), list(range(100, 200))
    kept = BlockEnds(200, block_size, BLANK)
    end = first
    for size in sizes:
        spans = [(end, end + size), (end + 1, end + size + 1)]
        kept.keep(
            [Stretch(a, size, table) for (a, _), table in zip(spans, tables, strict=True)],
            torch.cat([states(*span) for span in spans]),
        )
        end += size
    for table, start in zip(tables, (first, first + 1), strict=True):
        for position in range(1, end + 1):
            state = kept.before(position, table)
            if position % block_size:
                assert state is None
            elif position > start:
                assert state is not None
                assert state.tolist() == [position, position]
        assert kept.before(0, table) is None
