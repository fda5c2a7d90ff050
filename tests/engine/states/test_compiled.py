"""Compiled operations with a state: what plain loops say, and the same bits in any company."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardOutput
from engine.capture.recorder import KernelCall, Recorder
from engine.capture.recording import Recording
from engine.capture.sample import Sample, Shape
from engine.states.compiled import CompiledPlan, CompiledStates
from engine.states.plan import StatePlan
from engine.states.work import StateWork, state_work
from kvpool.state_store import StateStore
from worlds.lanes import examples
from worlds.state_cases import CASES, LENGTH, NUM_ROWS, STEPS, check_step
from worlds.state_walks import Neighbours, TextStep, run, served, store_of
from worlds.threads import threads


def compiled(store: StateStore, work: StateWork) -> StatePlan:
    return CompiledStates(store).plan(work)


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=examples(12, fuzzed=400))
@given(
    seed=st.integers(0, 1 << 30),
    num_requests=st.integers(0, 5),
    num_padding=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_threads=st.sampled_from([1, 2]),
)
def test_steps_leave_what_plain_loops_leave(
    case: str, seed: int, num_requests: int, num_padding: int, dtype: torch.dtype, num_threads: int
) -> None:
    work = state_work(Neighbours(Random(seed)).requests(num_requests, 0))
    with threads(num_threads):
        check_step(lambda rows: CASES[case](dtype, rows), work, num_padding, compiled)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_text_has_one_set_of_bits(
    case: str, dtype: torch.dtype, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is cut into steps, beside whom and in how many threads."""
    for name in ("_WORTH_A_TEAM", "_CHANNELS_FOR_A_TEAM"):
        monkeypatch.setattr(f"engine.states.compiled.{name}", 0)
    asked = CASES[case](dtype, NUM_ROWS)
    expected = served(asked, LENGTH, [TextStep(LENGTH)], compiled)
    for company, num_threads in ((0, 1), (2, 1), (1, 3)):
        with threads(num_threads):
            got = served(asked, LENGTH, STEPS[steps], compiled, company)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_was_recorded_serves_steps_of_other_requests(num_threads: int) -> None:
    """It is told of their walks by their plan."""
    asks = CASES["four taps"](torch.bfloat16, NUM_ROWS), CASES["Mamba"](torch.bfloat16, NUM_ROWS)
    works = [state_work(Neighbours(Random(seed)).requests(3, 0)) for seed in (1, 2)]
    assert works[0].num_rows != works[1].num_rows
    stores = [store_of(*(each.shape for each in asks)) for _ in range(2)]
    backends = [CompiledStates(store) for store in stores]

    def forward(plan: CompiledPlan) -> ForwardOutput:
        mixed, moved = (run(plan, ask, op) for op, ask in enumerate(asks))
        return ForwardOutput(mixed, (moved,))

    def sample(_: Shape) -> Sample:
        recorder = Recorder()
        plan = backends[1].plan(works[0])
        with recorder.watch():
            recorded = forward(plan)
        assert torch.equal(recorded.logits, again.logits)
        assert all(isinstance(each, KernelCall) for each in recorder.calls)
        return Sample(recorder, recorded)

    with threads(num_threads):
        forward(backends[0].plan(works[0]))
        again = forward(backends[0].plan(works[0]))
        expected = forward(backends[0].plan(works[1]))
        forward(backends[1].plan(works[0]))  # which keeps weights
        got = Recording(sample).replay(Shape(1, 1), backends[1].plan(works[1]), num_threads)
    results = zip((got.logits, *got.hidden), (expected.logits, *expected.hidden), strict=True)
    left = zip(*(each.states + each.rows for each in stores), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in (*results, *left))
