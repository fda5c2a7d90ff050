"""The kernels' search and the tensors' look at all tokens find what the oracle finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.sampling.sampler
from engine.kernels.gumbel_argmax import reference
from engine.request.params import SamplingParams
from engine.sampling.noise import gumbel_list, request_key
from engine.sampling.sampler import greedy_tokens, sampled_tokens
from worlds.device_world import no_host
from worlds.sampled_rows import DEVICES
from worlds.sampling_oracle import expected_token, random_row, random_truncation
from worlds.threads import threads

Way = Callable[[], AbstractContextManager[None]]
WAYS = pytest.mark.parametrize("way", [nullcontext, no_host], ids=["kernels", "tensors"])


def draw(
    logits: Tensor,
    params: list[SamplingParams],
    device: str = "cpu",
    positions: Sequence[int] | None = None,
) -> list[int]:
    """Row i draws under ``params[i]`` with its seed, at position 100 + i."""
    at = range(100, 100 + len(params)) if positions is None else positions
    keys = [request_key(each.seed, 0) for each in params]
    arrays = np.array(keys, np.int64), np.array(at, np.int64)
    return sampled_tokens(logits.to(device), *arrays, params).tolist()


def expected(logits: Tensor, params: list[SamplingParams]) -> list[int]:
    return [
        expected_token(row, p, request_key(p.seed, 0), 100 + i)
        for i, (row, p) in enumerate(zip(logits, params, strict=True))
    ]


def random_rows(
    rng: random.Random, num_rows: int, vocab_size: int
) -> tuple[Tensor, list[SamplingParams]]:
    logits = torch.stack([random_row(rng, vocab_size) for _ in range(num_rows)])
    return logits, [random_truncation(rng, vocab_size) for _ in range(num_rows)]


@WAYS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1024, 1500, 4096])
def test_the_search_finds_what_exhaustion_finds(vocab_size: int, device: str, way: Way) -> None:
    logits, params = random_rows(
        random.Random(vocab_size), 12 if vocab_size > 100 else 60, vocab_size
    )
    with way():
        assert draw(logits, params, device) == expected(logits, params)
    if way is nullcontext:
        found = [
            reference(
                row.numpy(),
                np.array(gumbel_list(request_key(p.seed, 0), 100 + index, range(vocab_size))),
                *(p.temperature, p.top_p, p.min_p, p.top_k),
            )
            for index, (row, p) in enumerate(zip(logits, params, strict=True))
        ]
        assert found == expected(logits, params)


def test_kernel_finds_what_tensors_find() -> None:
    rng = random.Random(70)
    logits, params = random_rows(rng, 96, 33_000)
    found = draw(logits, params)
    with no_host():
        assert found == draw(logits, params)


def test_kernel_draws_the_same_in_any_number_of_threads() -> None:
    rng = random.Random(71)
    logits, params = random_rows(rng, 40, 5000)
    alone = draw(logits, params)
    with threads(2):
        assert draw(logits, params) == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_drawn_from_as_if_they_were_float32(dtype: torch.dtype) -> None:
    logits, params = random_rows(random.Random(6), 16, 3000)
    logits = logits.to(dtype)
    assert draw(logits, params) == draw(logits.float(), params)


def test_small_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.sampling.sampler, "_PIECE_NUMEL", 1)
    rng = random.Random(3)
    logits, _ = random_rows(rng, 30, 300)
    params = [SamplingParams(top_p=0.4, top_k=rng.choice([0, 20]), seed=s) for s in range(30)]
    with no_host():
        assert draw(logits, params) == expected(logits, params)


@WAYS
def test_rows_are_drawn_the_same_alone_and_in_any_company(way: Way) -> None:
    rng = random.Random(8)
    logits, params = random_rows(rng, 41, 2100)
    with way():
        together = draw(logits, params)
        for size in (1, 2, 7, 40):
            picked = rng.sample(range(41), size)
            own, positions = [params[i] for i in picked], [100 + i for i in picked]
            alone = draw(logits[picked], own, positions=positions)
            assert alone == [together[i] for i in picked]


@WAYS
def test_equal_logits_at_a_border_share_their_fate(way: Way) -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 1.0]]).expand(400, 4).contiguous()
    for truncation in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        params = [SamplingParams(seed=seed, **truncation) for seed in range(400)]
        with way():
            assert set(draw(logits, params)) == {0, 1, 2}


@WAYS
def test_a_row_without_a_finite_logit_still_gives_a_token(way: Way) -> None:
    logits = torch.stack([torch.full((50,), float("-inf")), torch.full((50,), float("nan"))])
    with way():
        assert draw(logits, [SamplingParams(), SamplingParams(top_p=0.5)]) == [0, 0]
        assert greedy_tokens(logits).tolist() == [0, 0]


@WAYS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [3, 1500, 40_000])
def test_greedy_takes_the_lowest_id_among_equals(vocab_size: int, device: str, way: Way) -> None:
    logits = (random_rows(random.Random(vocab_size), 8, vocab_size)[0] * 2).round()
    firsts = [row.index(max(row)) for row in logits.tolist()]
    with way():
        assert greedy_tokens(logits.to(device)).tolist() == firsts
