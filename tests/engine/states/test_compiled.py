"""Compiled operations with a state: what plain loops say, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import ForwardOutput
from engine.capture.recording import CapturedForward, KernelCall, Recorder
from engine.kernels import walks
from engine.states.compiled import CompiledPlan, CompiledStates
from engine.states.plan import Convolution, PlainStates, Recurrence, StatePlan
from engine.states.work import Entry, StateWork, Walk, state_work
from kvpool.state_store import StateStore
from worlds.lanes import examples
from worlds.state_walks import Asked, Neighbours, TextStep, run, served, store_of
from worlds.threads import threads

LENGTH = 25
NUM_ROWS = LENGTH + 50  # those behind the text are what its neighbours ask


def compiled(store: StateStore, work: StateWork) -> StatePlan:
    return CompiledStates(store).plan(work)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def convolution(
    channels: int, width: int, dtype: torch.dtype, num_rows: int = NUM_ROWS, **more: Any
) -> Convolution:
    rows = drawn(num_rows, channels + 5, seed=1, dtype=dtype)[:, 5:]
    return Convolution(rows, drawn(channels, width, seed=2, dtype=dtype), **more)


def recurrence(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, num_rows: int = NUM_ROWS,
    has_beta: bool = True, per_key: bool = False,
) -> Recurrence:  # fmt: skip
    """Rows are slices of one projection, as models have them."""
    (key_heads, num_heads), (key_dim, value_dim) = heads, dims
    sizes = [key_heads * key_dim, key_heads * key_dim, num_heads * value_dim]
    parts = drawn(num_rows, sum(sizes), seed=3, dtype=dtype).split(sizes, 1)
    query, key = (each.view(num_rows, key_heads, key_dim) for each in parts[:2])
    value = parts[2].view(num_rows, num_heads, value_dim)
    shape = (num_rows, num_heads, key_dim) if per_key else (num_rows, num_heads)
    log_decay = -drawn(*shape, seed=4).abs()
    beta = drawn(num_rows, num_heads, seed=5).sigmoid() if has_beta else None
    return Recurrence(query, key, value, log_decay, beta, has_beta, key_dim**-0.5)


CASES: dict[str, Callable[[torch.dtype, int], Asked]] = {
    "four taps": lambda dtype, rows: convolution(96, 4, dtype, rows, silu=True),
    "odd channels": lambda dtype, rows: convolution(37, 3, dtype, rows),
    "a bias": lambda dtype, rows: convolution(16, 2, dtype, rows, bias=drawn(16, seed=6)),
    "one tap": lambda dtype, rows: convolution(24, 1, dtype, rows),
    "many channels": lambda dtype, rows: convolution(1100, 4, dtype, rows, silu=True),
    "delta rule": lambda dtype, rows: recurrence((2, 4), (32, 64), dtype, rows),
    "odd dimensions": lambda dtype, rows: recurrence((1, 3), (19, 21), dtype, rows),
    "decays of keys": lambda dtype, rows: recurrence((2, 2), (24, 32), dtype, rows, per_key=True),
    "Mamba": lambda dtype, rows: recurrence((1, 6), (40, 96), dtype, rows, has_beta=False),
    "decays of keys alone": lambda dtype, rows: recurrence(
        (2, 2), (17, 8), dtype, rows, has_beta=False, per_key=True
    ),
}


def test_walks_are_told_as_they_are_made() -> None:
    assert walks.Walk._fields == Walk._fields
    assert walks.Entry._fields == Entry._fields


def check_step(asked_of: Callable[[int], Asked], work: StateWork, num_padding: int) -> None:
    asked = asked_of(max(1, work.num_rows + num_padding))
    stores = [store_of(asked.shape) for _ in range(2)]
    expected, got = (
        run(backend(store, work), asked)
        for backend, store in zip((PlainStates, compiled), stores, strict=True)
    )
    step = max(torch.finfo(got.dtype).eps, 1e-6)
    assert got.dtype == expected.dtype
    both = got[: work.num_rows], expected[: work.num_rows]
    torch.testing.assert_close(*both, rtol=4 * step, atol=8 * step)
    assert not got[work.num_rows :].any()
    for mine, theirs in zip(
        stores[1].states + stores[1].rows, stores[0].states + stores[0].rows, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


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
        check_step(lambda rows: CASES[case](dtype, rows), work, num_padding)


CHAIN = (-1, 0, 1, 2, 3)
TREE = (-1, -1, 0, 1, 1, 3, 2, 4)
STEPS: dict[str, list[TextStep]] = {
    "one by one": [TextStep(1)] * LENGTH,
    "pieces": [TextStep(3), TextStep(14), TextStep(1), TextStep(7)],
    "drafts": [TextStep(4, CHAIN, [0, 1, 2]), TextStep(1, CHAIN, []), TextStep(1, CHAIN, [0, 1, 2, 3, 4]),
               TextStep(2, CHAIN, [0]), TextStep(8)],
    "trees": [TextStep(1, TREE, [1, 4, 7]), TextStep(1, TREE, [0, 2]), TextStep(1, TREE, [1, 3, 5]),
              TextStep(1, TREE, [0, 2, 6]), TextStep(1, TREE, []), TextStep(9)],
}  # fmt: skip


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

    recorder = Recorder()
    with threads(num_threads):
        forward(backends[0].plan(works[0]))
        again = forward(backends[0].plan(works[0]))
        expected = forward(backends[0].plan(works[1]))
        forward(backends[1].plan(works[0]))  # which keeps weights
        with recorder.watch():
            recorded = forward(backends[1].plan(works[0]))
        assert torch.equal(recorded.logits, again.logits)
        assert recorder.reason is None
        assert all(isinstance(each, KernelCall) for each in recorder.calls)
        graph = CapturedForward(recorder, recorded)
        got = graph.replay(backends[1].plan(works[1]), num_threads)
    results = zip((got.logits, *got.hidden), (expected.logits, *expected.hidden), strict=True)
    left = zip(*(each.states + each.rows for each in stores), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in (*results, *left))
