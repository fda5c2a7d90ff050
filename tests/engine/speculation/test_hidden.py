"""States wait until they are taken: all those of committed tokens, each request's in order."""

from __future__ import annotations

from collections import defaultdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import HiddenRows
from drafters.tree import DraftTree
from engine.batch import NORMED, RequestRows, build_batch
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams
from engine.sampling.state import SamplingState
from engine.schedule.request import Request, ScheduledRequest
from engine.speculation.hidden import _MOST_ROWS, _MOST_STEPS, WaitingStates

LAYERS = (NORMED, 1, 3)
WANTED = {"a": (3, NORMED), "b": (1,), "c": (), "d": (NORMED, 1, 3)}
"""Wanted layers by request: some want them in another order, one wants none."""
SIZE = 2


class World:
    """Requests whose states say of which layer and row of all they are."""

    def __init__(self) -> None:
        self.waiting = WaitingStates()
        self.requests = {}
        for name in WANTED:
            params = GenerationRequest(name, (1,) * 400, SamplingParams())
            self.requests[name] = Request(params, SamplingState(params, (), 50, 500))
        self.num_rows = 0
        self.expected: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Position and number of each row that a request has yet to be given, by request."""

    def step(self, asked: list[tuple[str, int, list[int]]]) -> None:
        """Each request's known rows, and rows of a draft of three that are accepted, in order."""
        found = []
        for name, num_known, accepted in asked:
            request = self.requests[name]
            base = request.num_computed_tokens
            each = ScheduledRequest(request, num_known, hidden_layers=WANTED[name])
            each.draft = DraftTree([7, 8, 9], [-1, 0, 0], [0, 0, 0])
            path = (0, *accepted)
            each.outcome = Outcome((5, 6, 7, 8), path, (5,) * len(path), len(accepted))
            tokens = [1] * num_known + [7, 8, 9]
            each.rows = RequestRows(tokens, num_known, base, each.draft.parents, [*range(200)], 4)
            request.num_computed_tokens += num_known + len(accepted)
            found.append(each)
        build_batch([each.rows for each in found], 4)
        for each in found:
            first, anchor = each.rows.first_row, each.rows.first_row + each.num_known - 1
            rows = [*range(first, anchor + 1), *(anchor + row for row in each.accepted_rows)]
            if each.hidden_layers:
                self.expected[each.request.request_id] += enumerate(
                    (self.num_rows + row for row in rows), each.base
                )
        count = sum(each.rows.num_rows for each in found)
        rows = torch.arange(self.num_rows, self.num_rows + count)[:, None].expand(count, SIZE)
        states = {layer: 10_000 * LAYERS.index(layer) + rows.float() for layer in LAYERS}
        self.num_rows += count
        self.waiting.add(found, states)
        for each in states.values():
            each.fill_(-1.0)  # the next step's will lie there

    def take(self) -> list[HiddenRows]:
        found = []
        for request, rows in self.waiting.take():
            assert self.requests[rows.request_id] is request
            found.append(rows)
        return found

    def check(self) -> None:
        """Checks that exactly the expected rows are taken, once."""
        told: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for each in self.take():
            layers = WANTED[each.request_id]
            assert len(each.hidden) == len(layers)
            numbers = [int(value) % 10_000 for value in each.hidden[0][:, 0]]
            for layer, states in zip(layers, each.hidden, strict=True):
                expected = [10_000 * LAYERS.index(layer) + number for number in numbers]
                assert states.tolist() == [[value] * SIZE for value in expected]
            assert each.token_ids is self.requests[each.request_id].token_ids
            told[each.request_id] += enumerate(numbers, each.first_position)
        assert dict(told) == {name: rows for name, rows in self.expected.items() if rows}
        self.expected.clear()


PARTS = st.tuples(st.integers(1, 5), st.sampled_from([[], [1], [1, 2], [1, 3]]))
STEPS = st.dictionaries(st.sampled_from(sorted(WANTED)), PARTS, min_size=1)
TURNS = st.lists(st.one_of(STEPS, st.just("take"), st.sampled_from(["a", "d"])), max_size=12)


@given(TURNS)
def test_all_that_waits_is_told_once_and_in_order(turns: list[object]) -> None:
    """Whatever comes between: what is taken early, and requests that nobody is to be told of."""
    world = World()
    for turn in turns:
        if isinstance(turn, dict):
            world.step([(name, *part) for name, part in turn.items()])
        elif turn == "take":
            world.check()
        else:
            world.waiting.forget(str(turn))
            world.expected.pop(str(turn), None)
    world.check()
    assert world.take() == []


def test_consecutive_rows_of_several_steps_come_together() -> None:
    world = World()
    for _ in range(3):
        world.step([("a", 1, [1]), ("b", 1, [])])
    found = world.take()
    assert [(each.request_id, each.first_position) for each in found] == [("a", 0), ("b", 0)]
    assert [len(each.hidden[0]) for each in found] == [6, 3]


def test_who_begins_again_is_told_of_a_stretch_of_its_own() -> None:
    world = World()
    world.step([("a", 3, [])])
    world.requests["a"].num_computed_tokens = 0
    world.step([("a", 2, [])])
    found = world.take()
    assert [(each.first_position, len(each.hidden[0])) for each in found] == [(0, 3), (0, 2)]


def test_there_are_soon_many() -> None:
    world = World()
    for _ in range(_MOST_STEPS - 1):
        world.step([("b", 1, [])])
    assert not world.waiting.are_many
    world.step([("c", 1, [])])
    assert not world.waiting.are_many, "nobody is to be told of it"
    world.step([("b", 1, [])])
    assert world.waiting.are_many
    world.waiting.take()
    assert not world.waiting.are_many
    world.step([("b", _MOST_ROWS, [])])
    assert world.waiting.are_many
