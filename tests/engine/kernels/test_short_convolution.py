"""A row of a convolution gets what its formula says (``tests/engine/states`` has walks of many)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.short_convolution import MOST_CHANNELS, block_of, convolved
from engine.states.compiled import CompiledStates
from engine.states.plan import Convolution
from engine.states.work import state_work
from kvpool.state_slots import StateRows
from kvpool.state_store import StateStore
from worlds.random_tensors import drawn
from worlds.state_cases import convolution
from worlds.state_walks import rows_of

STEP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NUM_ROWS = 6


def run(asked: Convolution, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A chain's rows behind a window, and the window behind them, in its place."""
    store = StateStore([asked.shape], 1, 0, torch.device("cpu"))
    store.states[0][0] = window
    rows = StateRows(source=0, target=0)
    work = state_work([rows_of(rows, 0, len(asked.rows), ())])
    return CompiledStates(store).plan(work).convolve(0, asked), store.states[0][0]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(64, 4), (21, 3), (600, 2), (5, 9)])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_rows_are_sums_of_taps(dtype: torch.dtype, channels: int, width: int, silu: bool) -> None:
    bias, window = drawn(channels, seed=7), drawn(width - 1, channels, seed=8)
    asked = convolution(channels, width, dtype, NUM_ROWS, bias=bias, silu=silu)
    got, behind = run(asked, window)
    inputs = torch.cat([window, asked.rows.float()]).double().numpy()
    weight, step = asked.weight.double().numpy(), STEP[dtype]
    for row in range(NUM_ROWS):
        taps = inputs[row : row + width]
        expected = [
            convolved(taps[:, at], weight[at], bias[at].item(), silu) for at in range(channels)
        ]
        np.testing.assert_allclose(got[row].double(), expected, rtol=2 * step, atol=8 * step)
    assert np.array_equal(behind.double().numpy(), inputs[NUM_ROWS:])


def test_weights_that_take_others_place_are_read_anew() -> None:
    store = StateStore([convolution(16, 2, torch.float32, 3).shape], 1, 0, torch.device("cpu"))
    backend = CompiledStates(store)
    work = state_work([rows_of(StateRows(), 0, 3, ())])
    asked = convolution(16, 2, torch.float32, 3)
    first = backend.plan(work).convolve(0, asked)
    assert torch.equal(backend.plan(work).convolve(0, asked), first)
    doubled = asked._replace(weight=2 * asked.weight)
    assert torch.equal(backend.plan(work).convolve(0, doubled), 2 * first)


@pytest.mark.parametrize(("channels", "num_tasks"), [(6144, 8), (6144, 1), (37, 4), (5, 400)])
def test_blocks_are_whole_lanes_and_not_more_than_fit(channels: int, num_tasks: int) -> None:
    block = block_of(channels, num_tasks)
    assert block % 16 == 0
    assert 0 < block <= MOST_CHANNELS
