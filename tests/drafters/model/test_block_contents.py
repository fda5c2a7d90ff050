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


def filled(first_row: int = 0) -> BlockContents:
    contents = BlockContents(SIZE, first_row)
    contents.write(TABLE, digests(TEXT[:first_row]), first_row, TEXT[first_row:])
    return contents


@pytest.fixture
def written() -> BlockContents:
    return filled()


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
    written.write([5], digests([]), 0, [1, 1, 1, 1])
    assert valid(written, TABLE, TEXT) == 0
    assert valid(written, [5, 3, 8], [1, 1, 1, 1, *TEXT[4:]]) == 4
    assert valid(written, [3], TEXT[4:8]) == 0
    written.write([5], digests([]), 0, TEXT[:4])
    assert valid(written, TABLE, TEXT) == 10, "what hung on the old text is found again"


def test_open_blocks_count_only_after_their_own_text(written: BlockContents) -> None:
    assert valid(written, [5, 3, 8], [*TEXT[:7], 0, 9, 9]) == 7
    moved = [1, 1, 1, 1]
    written.write([6, 4], digests([]), 0, [*TEXT[:4], *moved])
    assert valid(written, [6, 4, 8], [*TEXT[:4], *moved, 9, 9]) == 8


@pytest.mark.parametrize(
    ("first_row", "first"), [(row, first) for row in (0, 1) for first in range(row, 10)]
)
def test_what_is_forgotten_is_not_valid_nor_what_came_after_until_it_is_written_again(
    first_row: int, first: int
) -> None:
    contents = filled(first_row)
    contents.forget(TABLE, first, 1)
    assert valid(contents, TABLE, TEXT) == first
    contents.write(TABLE, digests(TEXT[:first]), first, TEXT[first:])
    assert valid(contents, TABLE, TEXT) == 10


def test_forgetting_reaches_over_blocks_and_nothing_is_forgotten_for_no_rows(
    written: BlockContents,
) -> None:
    written.forget(TABLE, 3, 0)
    assert valid(written, TABLE, TEXT) == 10
    written.forget(TABLE, 3, 6)
    written.write(TABLE, digests([]), 3, TEXT[3:4])
    assert valid(written, TABLE, TEXT) == 4


def test_a_row_after_a_gap_is_a_bug(written: BlockContents) -> None:
    written.forget(TABLE, 8, 2)
    with pytest.raises(AssertionError, match="gap"):
        written.write(TABLE, digests([]), 9, [1])


def test_digests_grow_with_the_text() -> None:
    text = digests(TEXT[:3])
    assert len(text.digests) == 1
    text.update(TEXT[:9])
    assert text.digests == digests(TEXT).digests
    assert len(set(text.digests)) == 3


# --- texts whose first token has no row ---


@pytest.fixture
def rowless() -> BlockContents:
    return filled(first_row=1)


def test_the_first_token_needs_no_row(rowless: BlockContents) -> None:
    assert valid(rowless, TABLE, TEXT) == 10
    assert valid(rowless, [9], TEXT) == 1
    assert valid(rowless, [9], []) == 0
    assert rowless.num_valid([9], digests(TEXT), TEXT, 0) == 0


def test_rows_after_another_first_token_are_others(rowless: BlockContents) -> None:
    other = [TEXT[0] + 1, *TEXT[1:]]
    assert valid(rowless, TABLE, other) == 1
    rowless.forget(TABLE, 1, 9)
    rowless.write(TABLE, digests(other), 1, other[1:])
    assert valid(rowless, TABLE, other) == 10
    assert valid(rowless, TABLE, TEXT) == 1


def test_a_block_of_the_first_token_alone() -> None:
    contents = BlockContents(1, first_row=1)
    text = TextDigests("", 1)
    text.update(TEXT)
    assert contents.num_valid(range(10), text, TEXT, 10) == 1
    contents.write(range(10), text, 1, TEXT[1:4])
    assert contents.num_valid(range(10), text, TEXT, 10) == 4


# --- states behind blocks ---


def test_the_state_behind_a_block_is_of_one_text() -> None:
    contents = BlockContents(SIZE)
    contents.keep_ends(TABLE, digests(TEXT), 2, 5)
    kept = [at for at in range(10) if contents.has_end(TABLE, digests(TEXT), at)]
    assert kept == [4]
    contents.keep_ends(TABLE, digests(TEXT), 7, 1)
    kept = [at for at in range(10) if contents.has_end(TABLE, digests(TEXT), at)]
    assert kept == [4, 8]
    other = [*TEXT[:5], 0, *TEXT[6:]]
    assert contents.has_end(TABLE, digests(other), 4)
    assert not contents.has_end(TABLE, digests(other), 8)
    assert not contents.has_end(TABLE, digests(TEXT, "other"), 4)
    contents.keep_ends(TABLE, digests(other), 5, 3)
    assert not contents.has_end(TABLE, digests(TEXT), 8)


def test_a_salt_may_hold_a_lone_surrogate() -> None:
    assert digests(TEXT, "\ud800").root != digests(TEXT, "?").root
