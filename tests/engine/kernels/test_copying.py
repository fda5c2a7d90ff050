"""Copies on the device are those that ``ngram`` proposes, to the token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape
from drafters.copying.ngram import NgramDrafter, NgramState
from engine.kernels.copying import MOST_TOKENS, Record, copy_rows
from worlds.device_world import no_host
from worlds.interpreted import DEVICE, ON_CPU

DATA = Path(__file__).resolve().parents[3] / "bench" / "data" / "heldout_edits.jsonl"
OPTIONS = {"ngram_min": 2, "ngram_max": 8}
SIZE = len(Record._fields)


class Step(NamedTuple):
    """A request between two steps: its text with the anchor, the draft behind it, what the target has
    chosen at their rows, and the nodes of the next draft."""

    text: list[int]
    draft: list[int]
    chosen: list[int]
    num_nodes: int

    @property
    def num_accepted(self) -> int:
        pairs = zip(self.draft, self.chosen, strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), len(self.draft))

    @property
    def grown(self) -> list[int]:
        return self.text + self.chosen[: self.num_accepted + 1]


class Texts:
    """The texts of a few requests, as a device keeps them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._texts = torch.zeros(count, MOST_TOKENS, dtype=torch.int32, device=device)
        self._num_there = [0] * count

    def rows(
        self, steps: Sequence[Step], options: dict[str, int] = OPTIONS
    ) -> list[list[list[int]]]:
        """Returns each request's rows, column by column. Slots are 1,000 more than positions."""
        records, rest, tokens, drafted, first_row = [], list[int](), list[int](), list[int](), 0
        for place, each in enumerate(steps):
            num_known, there = len(each.text), self._num_there[place]
            new_at, tail = SIZE * len(steps) + len(rest), each.text[there:]
            most = num_known + len(each.draft) + each.num_nodes + 1
            rest += [*tail, *range(1000 + num_known, 1000 + most)]
            sizes = len(tokens), len(each.draft), first_row, each.num_nodes
            matches = options["ngram_min"], options["ngram_max"]
            slots_at = new_at + len(tail)
            records += [*Record(place, num_known, there, new_at, *sizes, *matches, slots_at)]
            tokens += each.chosen
            drafted += [each.text[-1], *each.draft]
            first_row += 1 + each.num_nodes
            self._num_there[place] = num_known
        device = self._texts.device
        told = torch.tensor(records + rest, dtype=torch.int32, device=device)
        given = (torch.tensor(each, device=device) for each in (tokens, drafted))
        most_nodes = max(max(len(each.draft), each.num_nodes) for each in steps)
        sizes = len(steps), first_row, most_nodes
        found = copy_rows(told, self._texts, *given, *sizes).tolist()
        rows = []
        for each in steps:
            rows.append([column[: 1 + each.num_nodes] for column in found])
            found = [column[1 + each.num_nodes :] for column in found]
        return rows


def check(step: Step, rows: list[list[int]], state: NgramState) -> None:
    text, count = step.grown, 1 + step.num_nodes
    first = len(text) - 1
    tokens, positions, slots, refused, copied, matched = rows
    assert tokens[0] == text[-1]
    assert positions == [*range(first, first + count)]
    assert slots == [*range(1000 + first, 1000 + first + count)]
    assert refused == [len(step.draft) - step.num_accepted] * count
    if not step.num_nodes:
        return
    shape = DraftShape(1, step.num_nodes)
    expected = state.propose(DraftRequest("r", text, step.num_nodes, shape))
    if not expected.token_ids:
        assert (copied, matched) == ([-1] * count, [0] * count)
        assert tokens[1:] == [0] * step.num_nodes
        return
    assert copied[1:] == tokens[1:] == [*expected.token_ids]
    again = NgramDrafter().copied(copied[1:], matched[0])
    assert [*again.features] == [*expected.features]


@pytest.fixture(params=["loop", "program"])
def is_program(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param == "loop":
        yield False
        return
    with no_host():
        yield True


def replayed(text: list[int], start: int, rng: random.Random) -> Iterator[Step]:
    """A text that is written with drafts of other tokens now and then."""
    at, draft = start, list[int]()
    while at + 12 < len(text):
        chosen = text[at : at + 1 + len(draft)]
        step = Step(text[:at], draft, chosen, rng.choice([0, 1, 4, 8]))
        yield step
        at += step.num_accepted + 1
        draft = text[at : at + step.num_nodes]
        if draft and rng.random() < 0.5:
            draft[rng.randrange(len(draft))] = 300


@ON_CPU
def test_copies_of_replayed_edits_are_those_of_ngram(is_program: bool) -> None:
    lines = DATA.read_text().splitlines()[: 2 if is_program else 30]
    for number, line in enumerate(lines):
        edit = json.loads(line)
        prompt = [*edit["messages"][-1]["content"].encode()]
        whole = prompt + [*edit["completion"].encode()][: 60 if is_program else 400]
        state = NgramState(prompt, OPTIONS)
        texts = Texts(1, torch.device("cpu"))
        for step in replayed(whole, len(prompt), random.Random(number)):
            check(step, texts.rows([step])[0], state)


def drawn_steps(draw: st.DrawFn, num_kinds: int) -> list[Step]:
    tokens = st.integers(0, num_kinds)
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(st.lists(tokens, min_size=1, max_size=40))
        chosen = draw(st.lists(tokens, min_size=1, max_size=6))
        accepted = draw(st.integers(0, len(chosen) - 1))
        num_other = len(chosen) - 1 - accepted
        draft = chosen[:accepted] + draw(st.lists(tokens, min_size=num_other, max_size=num_other))
        steps.append(Step(text, draft, chosen, draw(st.integers(0, 40))))
    return steps


@ON_CPU
@pytest.mark.hypothesis
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_copies_of_any_texts_are_those_of_ngram(data: st.DataObject) -> None:
    steps = drawn_steps(data.draw, data.draw(st.sampled_from([1, 2, 6])))
    low = data.draw(st.integers(1, 4))
    options = {"ngram_min": low, "ngram_max": data.draw(st.integers(low, 16))}
    found = Texts(len(steps), torch.device("cpu")).rows(steps, options)
    with no_host():
        assert Texts(len(steps), DEVICE).rows(steps, options) == found
    for step, rows in zip(steps, found, strict=True):
        check(step, rows, NgramState(step.text, options))


def test_a_text_longer_than_what_is_looked_at_in_one_go(is_program: bool) -> None:
    rng = random.Random(1)
    text = [rng.randrange(50) for _ in range(2500)]
    device = DEVICE if is_program else torch.device("cpu")
    for start in (0, 900, 1020, 1500, 2480):
        text = text[:2500] + text[start : start + 9]
        step = Step(text, [], [text[start + 9]], 8)
        check(step, Texts(1, device).rows([step])[0], NgramState(text, OPTIONS))
