"""Operations with a state by Triton's programs: what plain loops say, and one set of bits."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Bucket
from engine.states.plan import StatePlan
from engine.states.triton import Room, TritonStates, told_of
from engine.states.work import StateWork, state_work
from kvpool.state_store import StateStore
from worlds.lanes import examples
from worlds.state_cases import CASES, LENGTH, NUM_ROWS, STEPS, check_step
from worlds.state_walks import Neighbours, TextStep, served

pytestmark = pytest.mark.usefixtures("patched_once")
BUCKET = Bucket(NUM_ROWS, 8)


def by_programs(store: StateStore, work: StateWork) -> StatePlan:
    return TritonStates(store).plan(work)


def in_a_room(store: StateStore, work: StateWork) -> StatePlan:
    backend = TritonStates(store)
    backend.reserve(BUCKET, 16)
    return backend.plan(work, BUCKET)


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=examples(2, fuzzed=50))
@given(
    seed=st.integers(0, 1 << 30),
    num_requests=st.integers(0, 3),
    num_padding=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_steps_leave_what_plain_loops_leave(
    case: str, seed: int, num_requests: int, num_padding: int, dtype: torch.dtype
) -> None:
    work = state_work(Neighbours(Random(seed)).requests(num_requests, 0))
    check_step(lambda rows: CASES[case](dtype, rows), work, num_padding, by_programs)


@pytest.mark.parametrize("steps", ["drafts", "trees"])
@pytest.mark.parametrize("case", ["four taps", "odd dimensions", "decays of keys alone"])
def test_a_text_has_one_set_of_bits(case: str, steps: str) -> None:
    """However it is cut into steps and beside whom, also where launches are made for larger steps."""
    asked = CASES[case](torch.bfloat16, NUM_ROWS)
    expected = served(asked, LENGTH, [TextStep(LENGTH)], by_programs)
    for backend, company in ((by_programs, 0), (in_a_room, 1)):
        got = served(asked, LENGTH, STEPS[steps], backend, company)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_step_that_has_no_room_is_refused() -> None:
    told = told_of(state_work(Neighbours(Random(1)).requests(3, 0)))
    with pytest.raises(ValueError, match="no room"):
        told.fitted(Room.for_steps(Bucket(160, 2), 16))
