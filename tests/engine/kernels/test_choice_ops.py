"""Tokens that programs choose are those of the tensors' look at all of a row."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.choice_ops import choose_rows
from engine.sampling.noise import request_key
from engine.sampling.noise_torch import gumbel
from worlds.interpreted import DEVICE

pytestmark = pytest.mark.usefixtures("patched_once")
INF, NAN = float("inf"), float("nan")


def drawn(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(DEVICE)


def noise_of(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = [request_key(seed, 0) for seed in range(num_rows)]
    return torch.tensor(keys, device=DEVICE), torch.arange(100, 100 + num_rows, device=DEVICE)


def expected(
    logits: torch.Tensor, noise: tuple[torch.Tensor, torch.Tensor], temperatures: list[float]
) -> list[int]:
    """Row by row; -1: no token."""
    found = []
    rows = zip(logits.float(), *noise, temperatures, strict=True)
    for row, key, position, temperature in rows:
        if temperature > 0:
            own = gumbel(key[None], position[None], torch.arange(len(row), device=DEVICE))[0]
            row = row.double() / temperature + own
        best = row.max(-1)
        found.append(0 if best.values.isnan() else int(best.indices))
    return [token if at >= 0 else -1 for token, at in zip(found, temperatures, strict=True)]


def chosen(
    logits: torch.Tensor, noise: tuple[torch.Tensor, torch.Tensor], temperatures: list[float]
) -> list[int]:
    column = torch.tensor(temperatures, dtype=torch.float64, device=DEVICE)
    tokens = choose_rows(logits, *noise, column).tolist()
    return [token if at >= 0 else -1 for token, at in zip(tokens, temperatures, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 40, 1024, 2500])
def test_programs_choose_what_tensors_choose(vocab_size: int, dtype: torch.dtype) -> None:
    logits, noise = drawn(40, vocab_size).to(dtype), noise_of(40)
    temperatures = [(0.0, 0.7, 1.0, 3.0, -1.0)[row % 5] for row in range(40)]
    found = chosen(logits, noise, temperatures)
    assert found == expected(logits, noise, temperatures)


def test_a_row_has_its_token_in_any_company() -> None:
    logits, noise = drawn(41, 3000), noise_of(41)
    temperatures = [0.0 if row % 3 else 1.3 for row in range(41)]
    together = chosen(logits, noise, temperatures)
    logits[7] = NAN
    for rows in ([4], [0, 40, 39], [*range(20, 38)]):
        own = noise[0][rows], noise[1][rows]
        alone = chosen(logits[rows], own, [temperatures[row] for row in rows])
        assert alone == [together[row] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_and_what_is_not_finite(temperature: float) -> None:
    logits, noise = drawn(5, 1500), noise_of(5)
    logits[0, 1200] = INF
    logits[1, 1300] = NAN
    logits[2] = -INF
    logits[3, [1400, 1100]] = INF
    logits[4, :] = -INF
    logits[4, 1499] = -3.0
    found = chosen(logits, noise, [temperature] * 5)
    assert found == [1200, 0, 0, 1100, 1499]
