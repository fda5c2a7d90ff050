"""Rows are valid where what was written is what the text says, and nowhere else."""

from __future__ import annotations

import pytest

from drafters.model.block_contents import BlockContents, TextDigests

SIZE = 4
TEXT = [7, 1, 7, 2, 7, 1, 7, 2, 9, 9]
TABLE = [5, 3, 8]


def digests(token_ids: list[int], cache_salt: str = "") -> TextDigests:
    text = TextDigests(cache_salt, SIZE)
    text.update(token_ids)
    return text


def valid(
    contents: BlockContents, table: list[int], token_ids: list[int], cache_salt: str = ""
) -> int:
    return contents.num_valid(table, digests(token_ids, cache_salt), token_ids, len(token_ids))


@pytest.fixture
def written() -> BlockContents:
    contents = BlockContents(SIZE)
    contents.write(TABLE, digests([]).root, 0, TEXT)
    return contents


def test_what_was_written_is_valid_as_far_as_texts_agree(written: BlockContents) -> None:
    assert valid(written, TABLE, TEXT) == 10
    assert valid(written, TABLE, [*TEXT, 4, 4, 4]) == 10
    for place in range(10):
        other = [*TEXT[:place], 0, *TEXT[place + 1 :]]
        assert valid(written, TABLE, other) == place
    assert written.num_valid(TABLE, digests(TEXT), TEXT, 6) == 6


def test_other_blocks_and_other_tenants_hold_nothing(written: BlockContents) -> None:
    assert valid(written, [5, 4, 8], TEXT) == 4
    assert valid(written, [3, 5, 8], TEXT) == 0
    assert valid(written, TABLE, TEXT, cache_salt="other") == 0
    assert valid(written, TABLE[:2], TEXT) == 8


def test_equal_tokens_after_another_text_are_other_rows(written: BlockContents) -> None:
    """Blocks 0 and 1 hold the same tokens, but only one of them saw nothing before."""
    written.write([5], digests([]).root, 0, [1, 1, 1, 1])
    assert valid(written, TABLE, TEXT) == 0
    assert valid(written, [5, 3, 8], [1, 1, 1, 1, *TEXT[4:]]) == 4
    assert valid(written, [3], TEXT[4:8]) == 0
    written.write([5], digests([]).root, 0, TEXT[:4])
    assert valid(written, TABLE, TEXT) == 10, "what hung on the old text is found again"


def test_open_blocks_count_only_after_their_own_text(written: BlockContents) -> None:
    assert valid(written, [5, 3, 8], [*TEXT[:7], 0, 9, 9]) == 7
    moved = [1, 1, 1, 1]
    written.write([6, 4], digests([]).root, 0, [*TEXT[:4], *moved])
    assert valid(written, [6, 4, 8], [*TEXT[:4], *moved, 9, 9]) == 8


@pytest.mark.parametrize("first", range(10))
def test_what_is_forgotten_is_not_valid_nor_what_came_after(
    written: BlockContents, first: int
) -> None:
    written.forget(TABLE, first, 1)
    assert valid(written, TABLE, TEXT) == first
    written.write(TABLE, digests([]).root, first, TEXT[first:])
    assert valid(written, TABLE, TEXT) == 10


def test_forgetting_reaches_over_blocks_and_nothing_is_forgotten_for_no_rows(
    written: BlockContents,
) -> None:
    written.forget(TABLE, 3, 0)
    assert valid(written, TABLE, TEXT) == 10
    written.forget(TABLE, 3, 6)
    written.write(TABLE, digests([]).root, 3, TEXT[3:4])
    assert valid(written, TABLE, TEXT) == 4


def test_a_row_after_a_gap_is_a_bug(written: BlockContents) -> None:
    written.forget(TABLE, 8, 2)
    with pytest.raises(AssertionError, match="gap"):
        written.write(TABLE, digests([]).root, 9, [1])


def test_digests_grow_with_the_text() -> None:
    text = digests(TEXT[:3])
    assert len(text.digests) == 1
    text.update(TEXT[:9])
    assert text.digests == digests(TEXT).digests
    assert len(set(text.digests)) == 3
