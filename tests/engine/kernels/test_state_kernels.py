"""A row of a recurrence or a convolution gets what its formula says (``tests/engine/states`` has walks of
many)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.recurrence import advanced
from engine.kernels.short_convolution import MOST_CHANNELS, block_of, convolved
from engine.states.compiled import CompiledStates
from engine.states.plan import Convolution, Recurrence
from engine.states.work import state_work
from kvpool.state_slots import StateRows
from kvpool.state_store import StateStore
from worlds.random_tensors import drawn
from worlds.state_cases import convolution, recurrence
from worlds.state_walks import rows_of

STEP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NUM_ROWS = 6


def run(
    asked: Recurrence | Convolution, start: torch.Tensor, target: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chain's rows from a state, and the state behind the last, in the slot ``target``; 0: in the
    first one's place."""
    store = StateStore([asked.shape], 2, 0, torch.device("cpu"))
    store.states[0][0] = start
    count = len(asked.value if isinstance(asked, Recurrence) else asked.rows)
    work = state_work([rows_of(StateRows(source=0, target=target), 0, count, ())])
    plan = CompiledStates(store).plan(work)
    rows = plan.recur(0, asked) if isinstance(asked, Recurrence) else plan.convolve(0, asked)
    return rows, store.states[0][target]


@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (64, 256), (7, 5)])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_rows_read_states_that_the_formula_makes(
    dtype: torch.dtype, dims: tuple[int, int], has_beta: bool
) -> None:
    asked = recurrence((1, 2), dims, dtype, 6, has_beta)
    start = drawn(2, *dims, seed=9)
    got, state = run(asked, start)
    query, key = (each[:, 0].double() for each in asked[:2])
    if asked.normalises:
        query, key = (
            each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key)
        )
    for head in range(2):
        mine = start[head].double().numpy()
        for row in range(6):
            beta = None if asked.beta is None else asked.beta[row, head].double().item()
            decay = np.exp(asked.log_decay[row, head].double().item())
            value = asked.value[row, head].double().numpy()
            scaled = query[row].numpy() * asked.scale
            mine, read = advanced(mine, key[row].numpy(), value, decay, beta, scaled)
            step, found = STEP[dtype], got[row, head].double().numpy()
            np.testing.assert_allclose(found, read, rtol=step, atol=8 * step)
        np.testing.assert_allclose(state[head].numpy(), mine, rtol=1e-4, atol=1e-5)


def test_a_row_that_is_no_number_does_not_touch_other_heads() -> None:
    asked = recurrence((2, 2), (32, 32), torch.float32, 3)
    start = drawn(2, 32, 32, seed=9)
    expected, _ = run(asked, start)
    asked.value[1, 1, 4] = torch.nan
    got, _ = run(asked, start)
    assert torch.equal(got[:, 0], expected[:, 0])
    assert torch.equal(got[0], expected[0])
    assert got[1:, 1].isnan().any(1).all()


@pytest.mark.parametrize("laid", ["turned", "wide"])
def test_rows_are_read_wherever_they_lie(laid: str) -> None:
    asked = recurrence((2, 4), (32, 64), torch.bfloat16, 5)
    start = drawn(4, 32, 64, seed=9)
    expected = run(asked, start)
    moved = [
        each.transpose(0, -1).contiguous().transpose(0, -1) if laid == "turned"
        else each.repeat_interleave(2, -1)[..., ::2]
        for each in (*asked[:4], asked.beta if asked.beta is not None else asked.value)
    ]  # fmt: skip
    query, key, value, log_decay, beta = moved
    got = run(Recurrence(query, key, value, log_decay, beta, *asked[5:]), start)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(64, 4), (21, 3), (600, 2), (5, 9)])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_rows_are_sums_of_taps(dtype: torch.dtype, channels: int, width: int, silu: bool) -> None:
    bias, window = drawn(channels, seed=7), drawn(width - 1, channels, seed=8)
    asked = convolution(channels, width, dtype, NUM_ROWS, bias=bias, silu=silu)
    got, behind = run(asked, window, target=0)
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
