"""Corrects the cost curve by the steps that run: a Kalman filter over the logarithms of a few factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_NOISE = 0.07**2
"""Variance of a step's seconds about their mean, relative."""
_MACHINE_DOUBT = 0.05**2
_MACHINE_DRIFT = 0.012**2
"""Per step."""
_KNOT_DOUBT = 0.08**2
_DRAFTS_DOUBT = 0.15**2
_KNOT_MEMORY = 1.0 - 1.0 / 400
"""Share of a knot's factor that a step keeps: without forgetting, a few slow steps at high row counts
would be believed for ever, since gamma then never goes there again."""
_LARGEST_SURPRISE = 0.1
"""Relative error beyond which an observation counts no more (Huber): a step that a neighbour made
three times slower moves the model by less than that, what stays half as slow again is learnt in ten or
twenty steps."""


class Correction:
    """Factors of ``num_knots`` knots, of steps with drafts and of all; 1 at first.

    One factor holds for all steps and follows the machine (clocks, neighbours), one for those where
    several requests' drafts are verified; one per knot of the cost curve follows what start-up got wrong
    about the curve's shape, and drifts back to 1 while its rows are not met. The filter knows how sure it
    is of each, so the first steps of a kind count most, and it knows that a machine that slowed down as a
    whole slowed down at the row counts, too, that are not visited meanwhile.
    """

    def __init__(self, num_knots: int) -> None:
        self._logs = np.zeros(2 + num_knots)
        doubts = np.array([_MACHINE_DOUBT, _DRAFTS_DOUBT, *[_KNOT_DOUBT] * num_knots])
        self._covariance = np.diag(doubts)
        # What every step forgets: products with these, and what it adds to the variances.
        self._memory = np.array([1.0, *[_KNOT_MEMORY] * (1 + num_knots)])
        self._memories = np.outer(self._memory, self._memory)
        self._drift = np.diag(doubts * (1.0 - self._memory**2))
        self._drift[0, 0] = _MACHINE_DRIFT
        self._design = np.zeros(2 + num_knots)

    @property
    def machine(self) -> float:
        return math.exp(self._logs[0])

    @property
    def drafts(self) -> float:
        return math.exp(self._logs[1])

    @property
    def knots(self) -> list[float]:
        factors: list[float] = np.exp(self._logs[2:]).tolist()
        return factors

    def observe(
        self, knots: Sequence[tuple[int, float]], surprise: float, has_drafts: bool = False
    ) -> None:
        """A step among ``knots``, with weights, took ``exp(surprise)`` times what was predicted."""
        covariance, design = self._covariance, self._design
        self._logs *= self._memory
        covariance *= self._memories
        covariance += self._drift
        design.fill(0.0)
        design[0], design[1] = 1.0, float(has_drafts)
        for knot, weight in knots:
            design[2 + knot] = weight
        spread = covariance @ design
        variance = float(spread @ design) + _NOISE
        # What is not believed does not make anything surer either.
        weight = _LARGEST_SURPRISE / max(_LARGEST_SURPRISE, abs(surprise))
        gain = spread * (weight / variance)
        covariance -= spread[:, None] * gain
        gain *= surprise
        self._logs += gain
