"""Operations with a state of many shapes, their steps, and a check of one against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.states.plan import Convolution, PlainStates, Recurrence
from engine.states.work import StateWork
from worlds.random_tensors import drawn
from worlds.state_walks import Asked, Backend, TextStep, run, store_of

LENGTH = 25
NUM_ROWS = LENGTH + 50  # those behind the text are what its neighbours ask


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
    "Mamba 1": lambda dtype, rows: recurrence(
        (1, 40), (8, 1), dtype, rows, has_beta=False, per_key=True
    ),
    "decays of keys alone": lambda dtype, rows: recurrence(
        (2, 2), (17, 8), dtype, rows, has_beta=False, per_key=True
    ),
}


def check_step(
    asked_of: Callable[[int], Asked], work: StateWork, num_padding: int, mine: Backend
) -> None:
    """Runs a step by plain loops and by a backend."""
    asked = asked_of(max(1, work.num_rows + num_padding))
    stores = [store_of(asked.shape) for _ in range(2)]
    expected, got = (
        run(backend(store, work), asked)
        for backend, store in zip((PlainStates, mine), stores, strict=True)
    )
    step = max(torch.finfo(got.dtype).eps, 1e-6)
    assert got.dtype == expected.dtype
    both = got[: work.num_rows], expected[: work.num_rows]
    torch.testing.assert_close(*both, rtol=4 * step, atol=8 * step)
    assert not got[work.num_rows :].any()
    for ours, theirs in zip(
        stores[1].states + stores[1].rows, stores[0].states + stores[0].rows, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


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
