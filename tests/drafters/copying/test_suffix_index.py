"""The compiled index finds what brute force finds."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from drafters.copying.suffix_index import SEPARATOR, IndexedText

LENGTHS = (4, 2, 1)
MOST = 8
SMALL_TEXTS = st.lists(st.integers(SEPARATOR, 3), max_size=60)
ENDINGS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def naive_places(token_ids: list[int], ending: list[int]) -> list[int]:
    """After every occurrence of a context of ``ending``, the longest context first, newest first,
    ``MOST`` of each."""
    found: list[int] = []
    for length in LENGTHS:
        context = ending[-length:]
        if len(context) < length:
            continue
        ends = range(length, len(token_ids) + 1)
        places = [at for at in ends if token_ids[at - length : at] == context]
        found += [at for at in reversed(places[-MOST:]) if at not in found]
    return found


@given(SMALL_TEXTS, ENDINGS, st.lists(st.integers(1, 9), max_size=8))
def test_it_finds_what_brute_force_finds(
    token_ids: list[int], ending: list[int], cuts: list[int]
) -> None:
    text = IndexedText()
    start = 0
    for cut in [*cuts, len(token_ids)]:
        text.append(token_ids[start : start + cut])
        text.index(len(text))
        start += cut
    assert text.token_ids == token_ids
    assert text.find(ending, MOST, 99) == naive_places(token_ids, ending)
    assert text.find(ending, MOST, 3) == naive_places(token_ids, ending)[:3]


def test_many_contexts_are_found_again() -> None:
    """The table grows several times."""
    token_ids = [(at * at) % 7_919 for at in range(5_000)]
    text = IndexedText()
    for start in range(0, len(token_ids), 100):
        text.append(token_ids[start : start + 100])
        text.index(len(text))
    for end in range(10, len(token_ids), 97):
        ending = token_ids[end - 10 : end]
        assert text.find(ending, MOST, 99) == naive_places(token_ids, ending)
    assert sum(map(sys.getsizeof, (text._tokens, text._links, text._table))) <= 112 * 5_000


def test_contexts_are_found_again_where_the_text_has_moved_as_the_table_grew() -> None:
    text = IndexedText()
    for start in range(0, 2_000, 400):
        text.append(range(start, start + 400))
        text.index(len(text))
        assert [at for at in range(start + 400) if at + 1 not in text.find([at], 1, 1)] == []


def test_what_is_forgotten_is_not_found() -> None:
    text = IndexedText()
    text.append([1, 2, 3, 1, 2, 4, 1, 2])
    text.forget(3)
    text.index(8)
    assert text.find([1, 2], MOST, 99) == [8, 5]
    assert text.num_indexed == 8


def test_texts_have_different_numbers() -> None:
    numbers = [IndexedText().told["serial"] for _ in range(3)]
    assert len({*numbers, 0}) == 4
