"""Texts for heads: what a file has to hold, and what is made of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from training.head_data import Text, draft_ids, groups, load_texts, unused_token

TEXTS = [Text((5, 5, 7, 7, 7, 2), 2), Text((1, 2, 2, 3), 1), Text((9, 9, 9, 9, 4), 4)]


def test_a_file_of_texts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    rows = [{"kind": "chat", "num_prompt": each.num_prompt, "ids": each.ids} for each in TEXTS]
    # A reply of nothing, and one of a token that nothing follows but the target's own view of it.
    rows += [{"num_prompt": 2, "ids": [1, 2]}, {"num_prompt": 2, "ids": [1, 2, 3]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_texts(path, 10) == [*TEXTS, Text((1, 2, 3), 2)]
    with pytest.raises(ValueError, match="line 1 is of another vocabulary"):
        load_texts(path, 7)
    for wrong in ('{"ids": [1, 2]}', "[1]", "no JSON", '{"ids": ["x"], "num_prompt": 1}'):
        path.write_text(f"{json.dumps(rows[0])}\n{wrong}\n")
        with pytest.raises(ValueError, match="line 2 is no text of training.written"):
            load_texts(path, 10)


def test_rows_are_those_of_replies() -> None:
    """The first row reads the reply's first token, the last one the token before its last."""
    assert [(each.first_row, each.num_rows) for each in TEXTS] == [(1, 4), (0, 3), (3, 1)]
    assert Text((1, 2, 3), 0).first_row == 0


def test_the_draft_vocabulary_is_what_replies_use_most() -> None:
    def ids(size: int) -> list[int] | None:
        found = draft_ids(TEXTS, 10, size)
        return None if found is None else found.tolist()

    assert ids(2) == [2, 7]
    assert ids(4) == [2, 3, 4, 7]
    assert ids(6) == [0, 1, 2, 3, 4, 7], "prompts do not count"
    assert ids(0) is None
    assert ids(10) is None


def test_the_mask_token_is_one_that_no_text_has() -> None:
    assert unused_token(TEXTS, 20) == 19
    assert unused_token(TEXTS, 10) == 8
    assert unused_token([Text((0, 1, 2, 0, 1), 1)], 3) == 2


def test_groups_hold_every_text_once_and_about_as_many_rows() -> None:
    rng = random.Random(0)
    texts = [Text(tuple([1] * rng.randint(4, 60)), 2) for _ in range(700)]
    for most in (1000, 10):
        found = groups(texts, range(100, 700), random.Random(1), 100, most)
        assert sorted(index for group in found for index in group) == list(range(100, 700))
        counts = [sum(min(texts[index].num_rows, most) for index in group) for group in found]
        assert max(counts) < 100 + min(most, 60)
        assert sum(count < 100 for count in counts) <= 3, "the last of 256 texts each"
        spread = [[len(texts[index].ids) for index in group] for group in found]
        assert max(max(each) - min(each) for each in spread) < 30
    assert found != groups(texts, range(100, 700), random.Random(2), 100, 10)
