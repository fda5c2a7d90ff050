"""The first weights of features: fits over texts that SmolLM2 wrote, greedy and at temperature 0.8.

Prompts of Spec-Bench with odd ids, by maximum likelihood. Requests learn on from these.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from drafters.merged.chance_loops import KINDS, NUM_SAID, NUM_VALUES

_FITTED = Path(__file__).parent / "data" / "weights.json"

_STRENGTH, _TRUE = 40.0, 0.9
"""How many guesses the first belief weighs, and the share of what they were given that is found."""


def first_weights() -> tuple[array[float], array[float]]:
    """Returns those of greedy and of sampled requests."""
    fitted = json.loads(_FITTED.read_text())
    return _flat(fitted["greedy"]), _flat(fitted["sampled"])


def _flat(by_kind: dict[str, list[float]]) -> array[float]:
    weights = array("d")
    for kind in KINDS:
        known = by_kind[kind]
        weights.extend([*known, *[0.0] * (NUM_VALUES - len(known))])
    said = [_STRENGTH * (bucket + 0.5) / NUM_SAID for bucket in range(NUM_SAID)]
    weights.extend([*said, *(_TRUE * each for each in said)])
    return weights
