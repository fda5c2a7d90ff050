"""Tokens that rows suggest: what plain numbers say, and what operations over tensors say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.draft_tokens import RowNoise, reference, suggest_rows
from engine.sampling.noise_torch import gumbel

SIZES = (1, 5, 32, 1000, 1024, 1025, 5000)


def drawn(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def noise_of(row: RowNoise, tokens: torch.Tensor) -> np.ndarray:
    found = gumbel(torch.tensor([row.key]), torch.tensor([row.position]), tokens)
    return found[0].numpy()


def expect_suggested(
    logits: torch.Tensor,
    rows: list[RowNoise],
    num_wanted: int,
    num_likeliest: int,
    token_map: torch.Tensor | None = None,
) -> None:
    tokens, shares = suggest_rows(logits, rows, num_wanted, num_likeliest, token_map)
    columns = torch.arange(logits.shape[1]) if token_map is None else token_map
    num_wanted = min(num_wanted, logits.shape[1])
    assert tokens.shape == shares.shape == (len(rows), num_wanted)
    for at, row in enumerate(rows):
        noise = noise_of(row, columns) if row.temperature else None
        likeliest = max(num_wanted, num_likeliest)
        best, sure = reference(logits[at].numpy(), noise, row.temperature, likeliest)
        assert tokens[at].tolist() == columns[best[:num_wanted]].tolist()
        np.testing.assert_allclose(shares[at].numpy(), sure[:num_wanted], rtol=1e-4)


@given(
    num_columns=st.sampled_from(SIZES),
    num_wanted=st.integers(1, 9),
    num_likeliest=st.sampled_from((1, 4, 128)),
    temperatures=st.lists(st.sampled_from((0.0, 0.3, 1.0, 2.5)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_best_are_suggested(
    num_columns: int, num_wanted: int, num_likeliest: int, temperatures: list[float], seed: int
) -> None:
    rows = [RowNoise(seed - 500, 40 + at, each) for at, each in enumerate(temperatures)]
    logits = drawn(len(rows), num_columns, seed)
    expect_suggested(logits, rows, num_wanted, num_likeliest)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_columns_stand_for_the_tokens_that_they_are_mapped_to(temperature: float) -> None:
    token_map = torch.randperm(9000, generator=torch.Generator().manual_seed(3))[:1500]
    rows = [RowNoise(7, position, temperature) for position in range(6)]
    expect_suggested(drawn(6, 1500, 4), rows, 4, 128, token_map.sort().values)


def test_of_equal_logits_the_first_column_comes_first() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [2000, 70, 1500]] = 2.0
    tokens, shares = suggest_rows(logits, [RowNoise(0, 0, 0.0)], 5, 128)
    assert tokens[0].tolist() == [70, 1500, 2000, 0, 1]
    assert shares[0, 0] == shares[0, 2] > shares[0, 3] == shares[0, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_ruled_out_has_no_share(temperature: float) -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [8, 9]] = 1.0
    tokens, shares = suggest_rows(logits, [RowNoise(1, 2, temperature)], 4, 128)
    assert {*tokens[0, :2].tolist()} == {8, 9}
    assert shares[0, :2].sum().item() == pytest.approx(1.0)
    assert shares[0, 2:].tolist() == [0.0, 0.0]


def test_numbers_that_are_none_are_left_out() -> None:
    logits = torch.full((1, 40), torch.nan)
    logits[0, 5] = 1.0
    for temperature in (0.0, 1.0):
        tokens, _ = suggest_rows(logits, [RowNoise(1, 2, temperature)], 3, 128)
        assert tokens[0, 0] == 5


def test_a_row_suggests_the_same_in_any_company() -> None:
    logits = drawn(8, 40_000, 9)  # enough for a team of threads
    rows = [RowNoise(at, at, 0.8 * (at % 2)) for at in range(8)]
    together = suggest_rows(logits, rows, 4, 128)
    for at, row in enumerate(rows):
        alone = suggest_rows(logits[at : at + 1], [row], 4, 128)
        assert all(torch.equal(a[at], b[0]) for a, b in zip(together, alone, strict=True))
