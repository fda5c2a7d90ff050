"""The noise is one function on every path, and behaves like independent standard Gumbel draws.

Seeds are fixed. For fresh ones every comparison would fail by chance at a rate of at most 1e-6, and
there are about 300 of them.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from compiled.noise_numbers import hashed, signed
from engine.sampling.noise import _unit_float, request_key
from engine.sampling.noise_torch import _hash, gumbel
from worlds.sampled_rows import DEVICES, gumbel_scalar


def keys_of(*seeds: int) -> Tensor:
    return torch.tensor([request_key(seed, 0) for seed in seeds])


def uniforms(noise: Tensor) -> Tensor:
    """Uniform on (0, 1) if ``noise`` is standard Gumbel."""
    return noise.double().neg().exp().neg().exp().flatten()


def assert_uniform(sample: Tensor) -> None:
    """Kolmogorov-Smirnov: P(D sqrt(n) > 2.7) < 2 exp(-2 * 2.7**2) = 9.3e-7."""
    ordered, count = sample.sort().values, len(sample)
    steps = torch.arange(count + 1) / count
    distance = torch.maximum((ordered - steps[:-1]).max(), (steps[1:] - ordered).max())
    assert distance * math.sqrt(count) < 2.7


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    """Linear correlation of uniforms is normal with deviation 1/sqrt(n): 5.2 deviations, 2e-7.

    The squares catch dependence that leaves the means alone.
    """
    for power in (1, 2):
        x, y = (((u - 0.5) * math.sqrt(12)) ** power for u in (a.flatten(), b.flatten()))
        x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
        assert abs((x * y).mean()) * math.sqrt(len(x)) < 5.2


def test_the_hash_is_splitmix64() -> None:
    """The published generator's first outputs for the seeds 1234567 and 0."""
    assert hashed(1234567, 0) == 6457827717110365317
    assert hashed(1234567, 1) == 3203168211198807973
    assert hashed(0, 0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("device", DEVICES)
def test_integers_are_equal_in_python_and_over_tensors(device: str) -> None:
    rng = random.Random(1)
    states = [rng.randrange(-(2**63), 2**63) for _ in range(500)] + [-(2**63), -1, 0, 2**63 - 1]
    counters = [rng.randrange(2**41) for _ in states]
    got = _hash(torch.tensor(states, device=device), torch.tensor(counters, device=device))
    pairs = zip(states, counters, strict=True)
    assert got.tolist() == [signed(hashed(s % 2**64, c)) for s, c in pairs]


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_equal_in_python_and_over_tensors(device: str) -> None:
    rng = random.Random(2)
    keys = [request_key(rng.randrange(2**64), choice) for choice in range(40)]
    positions = [rng.randrange(2**20) for _ in keys]
    token_ids = [rng.randrange(200_000) for _ in range(100)] + [0, 31, 32, 1023, 1024, 151_935]
    got = gumbel(*(torch.tensor(x, device=device) for x in (keys, positions, token_ids)))
    assert got.dtype == torch.float32
    pairs = zip(keys, positions, strict=True)
    assert got.tolist() == [[gumbel_scalar(k, p, v) for v in token_ids] for k, p in pairs]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 12345678901234567890123])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert -(2**63) <= request_key(seed, 0) < 2**63
    assert math.isfinite(gumbel_scalar(request_key(seed, 3), 10, 5))


def test_keys_differ_by_seed_and_choice() -> None:
    keys = {request_key(seed, choice) for seed in range(300) for choice in range(30)}
    assert len(keys) == 9000


def test_the_ends_of_the_uniform_stay_inside() -> None:
    assert 0 < _unit_float(0) < 2**-52
    assert 1 - 2**-52 < _unit_float(2**64 - 1) < 1


@pytest.mark.parametrize("vary", ["tokens", "positions", "seeds", "choices"])
def test_noise_is_gumbel_along_every_axis(vary: str) -> None:
    many, ids = torch.arange(60_000), torch.tensor([[77]])
    if vary == "tokens":
        noise = gumbel(keys_of(11), torch.tensor([5]), many)
    elif vary == "positions":
        noise = gumbel(keys_of(11).expand(60_000), many, ids)
    elif vary == "seeds":
        noise = gumbel(keys_of(*range(60_000)), torch.full((60_000,), 9), ids)
    else:
        keys = torch.tensor([request_key(4, choice) for choice in range(60_000)])
        noise = gumbel(keys, torch.full((60_000,), 9), ids)
    assert_uniform(uniforms(noise))


def test_large_noise_is_as_frequent_as_it_should_be() -> None:
    """4e6 draws; counts are Poisson: 5.2 deviations (2e-7) at means of 1341 and 182, and the exact
    tails beyond 3 .. 58 (7e-9 and 3e-9) at a mean of 24.6."""
    count = 4_000_000
    noise = torch.cat(
        [gumbel(keys_of(s), torch.tensor([s]), torch.arange(400_000)) for s in range(10)]
    )
    for level in (8.0, 10.0):
        mean = count * -math.expm1(-math.exp(-level))
        assert abs(int((noise > level).sum()) - mean) < 5.2 * math.sqrt(mean)
    assert 3 <= int((noise > 12).sum()) <= 58


def test_tokens_of_a_row_are_uncorrelated() -> None:
    rows = torch.stack(
        [uniforms(gumbel(keys_of(s), torch.tensor([3]), torch.arange(20_480))) for s in (1, 2, 3)]
    )
    for lag in [*range(1, 9), 31, 32, 33, 63, 64, 96, 512, 992, 1023, 1024, 1025]:
        assert_uncorrelated(rows[:, :-lag], rows[:, lag:])


def test_neighbouring_positions_seeds_and_choices_are_uncorrelated() -> None:
    ids, count = torch.arange(64), 600
    positions = torch.arange(count)
    by_position = uniforms(gumbel(keys_of(5).expand(count), positions, ids)).view(count, 64)
    by_seed = uniforms(gumbel(keys_of(*range(count)), torch.full((count,), 5), ids)).view(count, 64)
    choices = torch.tensor([request_key(5, choice) for choice in range(count)])
    by_choice = uniforms(gumbel(choices, torch.full((count,), 5), ids)).view(count, 64)
    diagonal = uniforms(gumbel(keys_of(*range(count)), positions, ids)).view(count, 64)
    for rows in (by_position, by_seed, by_choice, diagonal):
        for lag in (1, 2, 3, 16):
            assert_uncorrelated(rows[:-lag], rows[lag:])
            assert_uncorrelated(rows[:-lag, :-1], rows[lag:, 1:])  # along the diagonal
    for a, b in [(by_position, by_seed), (by_seed, by_choice), (by_position, by_choice)]:
        # Row 5 of two of them is the same (seed 5, position 5, choice 0) by construction.
        assert_uncorrelated(a[10:], b[10:])


def test_pairs_within_a_group_fill_the_square_evenly() -> None:
    """Chi-squared with 63 degrees of freedom: above 146 with probability 2e-8."""
    count = 40_000
    keys, positions = keys_of(8).expand(count), torch.arange(count)
    noise = uniforms(gumbel(keys, positions, torch.tensor([64, 96, 96 + 31 * 20, 65])))
    cells = (noise.view(count, 4) * 8).long()
    for a, b in [(0, 1), (0, 2), (0, 3)]:
        seen = torch.bincount(cells[:, a] * 8 + cells[:, b], minlength=64).double()
        assert ((seen - count / 64) ** 2 / (count / 64)).sum() < 146


def test_the_largest_of_a_group_is_anyone_and_gumbel_shifted_by_log_32() -> None:
    """Chi-squared with 31 degrees of freedom: above 93 with probability 4e-8."""
    count = 20_000
    group = 7 + 32 * torch.arange(32)
    noise = gumbel(keys_of(21).expand(count), torch.arange(count), group)
    largest, member = noise.max(dim=1)
    assert_uniform(uniforms(largest - math.log(32)))
    seen = torch.bincount(member, minlength=32).double()
    assert ((seen - count / 32) ** 2 / (count / 32)).sum() < 93
