"""A target that draws, for drafters that draw with it: distributions from a table, noise by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, partial

from drafters.base import Drafter, DraftSampling
from engine.sampling.noise import gumbel_list, request_key
from worlds.simulated_target import go_on

Probs = Callable[[Sequence[int]], dict[int, float]]
"""The target's distribution after a text, at temperature 1."""


def markov_probs(num_tokens: int, context: int = 2, sharpness: float = 2.0, seed: int = 0) -> Probs:
    """A fixed random distribution after every ``context`` tokens."""

    @cache
    def after(ending: tuple[int, ...]) -> dict[int, float]:
        rng = random.Random(f"{seed} {ending}")
        weights = [math.exp(sharpness * rng.gauss(0, 1)) for _ in range(num_tokens)]
        return {token: weight / sum(weights) for token, weight in enumerate(weights)}

    return lambda token_ids: after(tuple(token_ids[-context:]))


def noise_of(seed: int) -> Callable[[int, Sequence[int]], Sequence[float]]:
    """The engine's own noise."""
    return partial(gumbel_list, request_key(seed, 0))


def sampling_of(seed: int, temperature: float = 1.0, **others: object) -> DraftSampling:
    return DraftSampling(temperature, noise=noise_of(seed), **others)  # type: ignore[arg-type]


def choose(probs: dict[int, float], position: int, sampling: DraftSampling) -> int:
    """The target's token: greedy or Gumbel-max, lowest id among equals."""
    ids = sorted(probs)
    if sampling.temperature == 0:
        return max(ids, key=lambda each: (probs[each], -each))
    noise = dict(zip(ids, sampling.noise(position, ids), strict=True))
    return max(ids, key=lambda each: math.log(probs[each]) / sampling.temperature + noise[each])


def ranked(probs: dict[int, float], k: int) -> list[int]:
    return sorted(probs, key=lambda each: (-probs[each], each))[:k]


def decode(
    drafter: Drafter,
    request_id: str,
    token_ids: list[int],
    probs: Probs,
    num_tokens: int,
    sampling: DraftSampling,
) -> list[int]:
    """Extend ``token_ids`` by at least ``num_tokens``; the request must be open. Returns the number
    emitted per step."""

    def written(text: Sequence[int]) -> int:
        return choose(probs(text), len(text), sampling)

    def tops(text: Sequence[int]) -> dict[int, float]:
        row = probs(text)
        return {each: row[each] for each in ranked(row, drafter.num_top_tokens(request_id))}

    how = {"sampling": sampling, "request_id": request_id, "tops": tops}
    return go_on(drafter, token_ids, written, num_tokens, **how).num_emitted
