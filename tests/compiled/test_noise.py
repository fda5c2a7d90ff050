"""The compiled noise is the one that the engine samples with."""

from __future__ import annotations

import pytest

from compiled.noise import hash_of, noise_of
from engine.sampling.noise import gumbel_list, request_key

TOKENS = [0, 1, 31, 32, 33, 1_023, 1_024, 4_000, 49_151, 255_999]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (77, 100), (-5, 40_000)])
def test_it_is_the_engines_noise(seed: int, position: int) -> None:
    key = request_key(seed, 0)
    state = hash_of(key, position)
    assert [noise_of(state, token) for token in TOKENS] == gumbel_list(key, position, TOKENS)
