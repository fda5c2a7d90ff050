"""Top tokens by context: found where they were kept, bounded, and learned from all rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drafters.base import DraftRequest, DraftSampling, DraftShape, Observation
from drafters.merged import merging
from drafters.merged.merging import MergedText, Merging
from drafters.tree import EMPTY, DraftTree
from engine.sampling.noise import gumbel_list
from worlds.simulated_target import children_of

TREE = DraftShape(4, 4)
LOGITS = (-0.9, -1.2, -1.6)


def say(text: MergedText, token_ids: list[int], emitted: int, tops: Sequence[int]) -> None:
    token_ids.append(emitted)
    rows = ([emitted], [0], [emitted], [tops], None, [LOGITS])
    text.observe(Observation("r", token_ids, EMPTY, *rows))


def drafted(core: Merging, token_id: int, num: int = 3) -> set[int]:
    """The first tokens of a draft behind a prompt of this token."""
    tree = core.open([token_id], "salt").propose(DraftRequest("x", [token_id], num, TREE))
    return {*children_of(tree)}


def test_rows_are_found_by_their_last_tokens_and_moved_as_the_table_grows() -> None:
    core = Merging()
    text = [1_000_000]
    writer = core.open(text, "salt")
    for number in range(2_000):
        say(writer, text, number + 1, [number + 1, 500_000 + number, 600_000 + number])
    for number in (10, 700, 1_990):
        assert drafted(core, number) == {number + 1, 500_000 + number, 600_000 + number}


def test_of_what_is_less_likely_than_asked_for_only_the_likeliest_is_drafted() -> None:
    core = Merging()
    text = [1_000_000]
    writer = core.open(text, "salt")
    for number in range(40):
        say(writer, text, number % 4, [number % 4, 500_000 + number, 600_000 + number])
    whole = writer.propose(DraftRequest("r", text, 16, TREE))
    for least in (0.01, 0.1, 0.3, 1.0):
        asked = DraftRequest("r", text, 16, TREE, row_prices=(least / 0.7,))
        survivals = sorted(writer.propose(asked).survivals, reverse=True)
        likely = [each for each in whole.survivals if each >= least]
        assert survivals == sorted(whole.survivals, reverse=True)[: len(survivals)]
        assert len(survivals) == min(len(likely) + 1, len(whole))


def test_a_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_ROWS", 2_048)
    core = Merging()
    text = [1_000_000]
    writer = core.open(text, "salt")
    for number in range(3_000):
        say(writer, text, number, [number, 500_000 + number, 600_000 + number])
    assert core.table("salt").told["size"] == 2_048
    tree = writer.propose(DraftRequest("r", [*text[:-1], 2_998], 3, TREE))
    assert 2_999 in drafted(core, 2_998)
    assert len(tree) <= 3


def test_rows_of_branches_that_were_not_accepted_teach_as_well() -> None:
    core = Merging()
    text = [1, 2]
    tree = DraftTree([7, 8], [-1, -1], [0, 0])
    writer = core.open([1], "salt")
    tops = [[2, 3, 4], [70, 71, 72], [80, 81, 82]]
    writer.observe(Observation("r", text, tree, [2, -1, -1], [0], [2], tops, None, [LOGITS] * 3))
    assert drafted(core, 7) == {70, 71, 72}


def test_a_sampled_request_drafts_first_what_its_noise_favours() -> None:
    core = Merging()
    token_ids = list(range(1_000, 1_008))
    logits = [0.0] * 8
    text = [1, 2]
    writer = core.open([1], "salt")
    writer.observe(Observation("r", text, EMPTY, [2], [0], [2], [token_ids], None, [logits]))
    num_first = 0
    for key in range(40):
        reader = core.open([1], "salt")
        sampling = DraftSampling(1.0, key=key)
        tree = reader.propose(DraftRequest("x", [1], 1, DraftShape(1, 1), sampling))
        noise = gumbel_list(key, 1, token_ids)
        best = max(range(8), key=noise.__getitem__)
        num_first += list(tree.token_ids) == [token_ids[best]]
    assert num_first > 30
