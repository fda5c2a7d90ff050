"""Attention that reads the block store in place: blocks of any size, threads, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionOptions, choose_backend
from worlds.attended import PLAIN, Part, World, chains
from worlds.threads import threads

CPU = torch.device("cpu")
TREE = (-1, -1, 0, 1, 1, 3, 2, 5, 5, 7, 9, -1, 11, 11, 12, 14, 15, 16, 17, 18, 19, 20)


def test_blocks_of_every_size_give_the_same_bits() -> None:
    """Keys that lie together are read in place, others slot by slot."""
    asked = [(0, 300, 3, TREE), (1, 41, 2, chains(4))]
    outputs = [
        torch.cat(World(4, 2, 24, 32, torch.bfloat16, size).step(asked)) for size in (16, 48, 7, 24)
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(
    ("part", "first_key", "options"),
    [
        ((0, 1000, 1, ()), 0, PLAIN),
        ((0, 1000, 1, ()), 600, PLAIN),
        ((0, 990, 9, ()), 1, replace(PLAIN, sees_block=True)),
        ((0, 990, 9, ()), 300, replace(PLAIN, sees_block=True, window=500)),
    ],
)
def test_long_texts_of_few_requests_are_divided_among_threads_without_a_trace(
    part: Part, first_key: int, options: AttentionOptions
) -> None:
    world = World(2, 1, 64, 64, torch.float32)
    with threads(1):
        (one,) = world.step([part], options, first_keys=[first_key])
    for count in (2, 3):
        with threads(count):
            (divided,) = world.step([part], options, first_keys=[first_key])
        assert torch.equal(divided, one)
    expected = world.expected(part, options, first_key)
    torch.testing.assert_close(one.double(), expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float64}, "knows no torch.float64"),
        ({"kv_dtype": torch.float8_e5m2}, "knows no torch.float8_e5m2"),
        ({"dtype": torch.float8_e4m3fn}, "knows no torch.float8_e4m3fn"),
    ],
)
def test_types_that_it_does_not_know_are_refused(changed: dict[str, Any], reason: str) -> None:
    needs = replace(World(4, 2, 16, 16, torch.float32).needs, **changed)
    with pytest.raises(ValueError, match=reason):
        choose_backend("paged", needs)
    with pytest.raises(ValueError, match=f"{reason}.*sdpa: it is for determinism fast"):
        choose_backend(None, needs)
