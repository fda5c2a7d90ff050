"""Many requests under one verification, and the p-values of what they wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from scipy.stats import chi2  # type: ignore[import-untyped]

from engine.core import EngineCore
from engine.request.params import SamplingParams, SpeculativeParams, VerificationName
from worlds.engine_harness import Driver, drafting, request
from worlds.sampling_oracle import edited_row, truncated_probs
from worlds.scripted_target import ScriptedTarget

_Key = TypeVar("_Key", bound=Hashable)
ALPHA = 1e-4
VOCAB = 16
NUM_REQUESTS = 2000
TARGET = ScriptedTarget(VOCAB, habit=16, sharpness=1.2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLED = SamplingParams(temperature=1.0)
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.8, frequency_penalty=0.7)
NEAR_THE_BEST = SamplingParams(temperature=1.0, further={"top_n_sigma": 1.2})


CASES: dict[str, tuple[VerificationName, list[int], SamplingParams, SpeculativeParams]] = {
    "chain": ("rejection", [1, 1], SAMPLED, drafting("drawing", num_tokens=2)),
    "block": ("block", [1, 1], SAMPLED, drafting("drawing", num_tokens=2)),
    "tree": ("rejection", [3, 2], SAMPLED, drafting("drawing", num_tokens=9, width=3)),
    "nucleus_chain": ("rejection", [1, 1], NUCLEUS, drafting("drawing", num_tokens=2)),
    "nucleus_block": ("block", [1, 1], NUCLEUS, drafting("drawing", num_tokens=2)),
    "top_n_sigma": ("rejection", [1, 1], NEAR_THE_BEST, drafting("drawing", num_tokens=2)),
    "goodput_tree": ("rejection", [2, 2], SAMPLED, drafting("drawing", "goodput", width=2)),
}


def next_probs(sampling: SamplingParams, output: tuple[int, ...]) -> list[float]:
    text = [*PROMPT, *output]
    row = TARGET.logits([TARGET.logit_row(0, text[-1], text[-2])])[0].clone()
    for token_id in output:
        row[token_id] -= sampling.frequency_penalty
    edited = edited_row(row, replace(sampling, frequency_penalty=0.0), [], [])
    return truncated_probs(edited, sampling)


def pair_probs(sampling: SamplingParams) -> tuple[dict[tuple[int, int], float], ...]:
    """Laws of the first two tokens, and of the last two of three."""
    early: Counter[tuple[int, int]] = Counter()
    late: Counter[tuple[int, int]] = Counter()
    for a, first in enumerate(next_probs(sampling, ())):
        for b, second in enumerate(next_probs(sampling, (a,)) if first else ()):
            early[a, b] = first * second
            for c, third in enumerate(next_probs(sampling, (a, b)) if second else ()):
                late[b, c] += first * second * third
    return early, late


def run_many(
    core: EngineCore,
    prompt: list[int],
    sampling: SamplingParams,
    speculation: SpeculativeParams,
    num_requests: int = NUM_REQUESTS,
) -> Driver:
    """Requests that differ in their seed alone."""
    return Driver(core).run(
        *(
            request(f"r{seed}", prompt, replace(sampling, seed=seed), speculation)
            for seed in range(num_requests)
        )
    )


def p_value(counts: Counter[_Key], probs: Mapping[_Key, float], least_cells: int = 20) -> float:
    """Pearson's; cells that expect fewer than five are pooled, and more than ``least_cells`` are left."""
    total = counts.total()
    cells = [(p * total, counts[key]) for key, p in probs.items() if p * total >= 5]
    expected = total - sum(each for each, _ in cells)
    if expected >= 5:
        cells.append((expected, total - sum(count for _, count in cells)))
    assert len(cells) > least_cells
    statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def p_values(name: str, driver: Driver) -> list[float]:
    texts = list(driver.token_ids.values())
    laws = pair_probs(CASES[name][2])
    found = [Counter((text[at], text[at + 1]) for text in texts) for at in (0, 1)]
    for counts, probs in zip(found, laws, strict=True):
        assert all(probs[pair] > 0 for pair in counts), "a token that truncation rules out"
    return [p_value(counts, probs) for counts, probs in zip(found, laws, strict=True)]
