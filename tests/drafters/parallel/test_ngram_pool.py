from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafters.parallel.ngram_pool import NgramPool


def test_the_oldest_goes_first_and_what_comes_again_is_new() -> None:
    pool = NgramPool(3, num_per_key=2, max_keys=10)
    pool.insert(1, (2, 3))
    pool.insert(1, (4, 5))
    pool.insert(1, (2, 3))  # now newer than (4, 5)
    pool.insert(1, (6, 7))
    assert pool.newest(1, 9) == [(6, 7), (2, 3)]
    assert pool.newest(1, 1) == [(6, 7)]
    assert pool.newest(2, 9) == []


def test_looking_up_refreshes_nothing() -> None:
    pool = NgramPool(2, num_per_key=2, max_keys=10)
    pool.insert(1, (2,))
    pool.insert(1, (3,))
    pool.newest(1, 2)
    pool.insert(1, (4,))
    assert pool.newest(1, 9) == [(4,), (3,)]


def test_keys_are_bounded_and_the_one_not_inserted_to_for_longest_goes() -> None:
    pool = NgramPool(2, num_per_key=2, max_keys=2)
    for key in (1, 2, 1, 3):
        pool.insert(key, (9,))
    assert (pool.newest(1, 9), pool.newest(2, 9), pool.newest(3, 9)) == ([(9,)], [], [(9,)])
    assert pool.num_keys() == 2


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 5), st.integers(1, 4))
def test_a_text_gives_the_newest_of_all_its_ngrams(text: list[int], n: int, num: int) -> None:
    pool = NgramPool(n, num, max_keys=99)
    pool.insert_text(text)
    for key in range(4):
        starts = [i for i in range(len(text) - n, -1, -1) if text[i] == key]
        distinct = list(dict.fromkeys(tuple(text[i + 1 : i + n]) for i in starts))
        assert pool.newest(key, num) == distinct[:num]
    assert pool.size() <= num * pool.num_keys()
