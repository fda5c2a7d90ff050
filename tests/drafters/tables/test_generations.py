"""Bounded, and what is written stays for at least a generation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafters.tables.generations import Generations


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(2, 20))
def test_holds_the_newest_and_never_more_than_the_bound(keys: list[int], bound: int) -> None:
    kept: Generations[int] = Generations(bound)
    order: dict[int, int] = {}
    for value, key in enumerate(keys):
        kept.put(key, value)
        order.pop(key, None)
        order[key] = value
        assert len(kept) <= bound
        for newest in list(order)[-(bound // 2) :]:
            assert kept.get(newest) == order[newest]
    held = {key: kept.get(key) for key in order if kept.get(key) is not None}
    assert len(held) == len(kept)
    assert held.items() <= order.items()


def test_what_is_not_written_for_long_goes() -> None:
    kept: Generations[str] = Generations(4)
    kept.put(1, "old")
    for key in (2, 3, 4, 5, 6):
        kept.put(key, "new")
    assert kept.get(1) is None
