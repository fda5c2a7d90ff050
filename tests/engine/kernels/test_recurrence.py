"""A row of a recurrence gets what its formula says (``tests/engine/states`` has walks of many)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.recurrence import advanced
from engine.states.compiled import CompiledStates
from engine.states.plan import Recurrence
from engine.states.work import state_work
from kvpool.state_slots import StateRows
from kvpool.state_store import StateStore
from worlds.random_tensors import drawn
from worlds.state_cases import recurrence
from worlds.state_walks import rows_of

STEP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def recurred(asked: Recurrence, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A chain's rows from a state, and the state behind the last."""
    store = StateStore([asked.shape], 2, 0, torch.device("cpu"))
    store.states[0][0] = start
    rows = StateRows(source=0, target=1)
    work = state_work([rows_of(rows, 0, len(asked.value), ())])
    return CompiledStates(store).plan(work).recur(0, asked), store.states[0][1]


@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (64, 256), (7, 5)])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_rows_read_states_that_the_formula_makes(
    dtype: torch.dtype, dims: tuple[int, int], has_beta: bool
) -> None:
    asked = recurrence((1, 2), dims, dtype, 6, has_beta)
    start = drawn(2, *dims, seed=9)
    got, state = recurred(asked, start)
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
    expected, _ = recurred(asked, start)
    asked.value[1, 1, 4] = torch.nan
    got, _ = recurred(asked, start)
    assert torch.equal(got[:, 0], expected[:, 0])
    assert torch.equal(got[0], expected[0])
    assert got[1:, 1].isnan().any(1).all()


@pytest.mark.parametrize("laid", ["turned", "wide"])
def test_rows_are_read_wherever_they_lie(laid: str) -> None:
    asked = recurrence((2, 4), (32, 64), torch.bfloat16, 5)
    start = drawn(4, 32, 64, seed=9)
    expected = recurred(asked, start)
    moved = [
        each.transpose(0, -1).contiguous().transpose(0, -1) if laid == "turned"
        else each.repeat_interleave(2, -1)[..., ::2]
        for each in (*asked[:4], asked.beta if asked.beta is not None else asked.value)
    ]  # fmt: skip
    query, key, value, log_decay, beta = moved
    got = recurred(Recurrence(query, key, value, log_decay, beta, *asked[5:]), start)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
