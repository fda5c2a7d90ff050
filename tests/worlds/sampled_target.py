"""A target that draws, for drafters that draw with it: distributions from a table, noise by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, partial

from drafters.base import Drafter, DraftRequest, DraftSampling, DraftShape, Observation
from engine.sampling.noise import gumbel_list, request_key
from worlds.simulated_target import verify_step

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
    *,
    max_nodes: int = 8,
    shape: DraftShape | None = None,
) -> list[int]:
    """Extend ``token_ids`` by at least ``num_tokens``; the request must be open. Returns the number
    emitted per step. Checks that a request's own text never depends on its drafts."""
    shape, emitted_per_step = shape or DraftShape(), []

    def written(text: Sequence[int]) -> int:
        return choose(probs(text), len(text), sampling)

    while sum(emitted_per_step) < num_tokens:
        request = DraftRequest(request_id, token_ids, max_nodes, shape, sampling)
        (tree,) = drafter.propose([request])
        tree.validate()
        assert len(tree) <= max_nodes
        texts = [list(token_ids)]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            texts.append([*texts[parent + 1], token])
        rows = [probs(text) for text in texts]
        row_tokens = [written(text) for text in texts]
        path, emitted = verify_step(tree, token_ids, written)
        token_ids += emitted
        k = drafter.num_top_tokens(request_id)
        tops = [ranked(row, k) for row in rows]
        top_probs = [[row[each] for each in top] for row, top in zip(rows, tops, strict=True)]
        seen = Observation(request_id, token_ids, tree, row_tokens, path, emitted, tops, top_probs)
        drafter.observe([seen])
        emitted_per_step.append(len(emitted))
    return emitted_per_step
