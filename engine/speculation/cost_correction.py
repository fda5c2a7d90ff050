"""What steps teach about their cost: a Kalman filter over logarithms of factors.

One factor holds for all steps and follows the machine (clocks, neighbours); one per knot of the cost
curve follows what start-up got wrong about the curve's shape, and drifts back to 1 while nobody looks.
The filter knows how sure it is of each, so the first steps of a kind count most, and it knows that a
machine that slowed down as a whole slowed down at the row counts, too, that are not visited meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_NOISE = 0.07**2
"""Variance of a step's seconds about their mean, relative."""
_MACHINE_DOUBT = 0.05**2
_MACHINE_DRIFT = 0.012**2
"""Per step."""
_KNOT_DOUBT = 0.08**2
_KNOT_MEMORY = 1.0 - 1.0 / 400
"""Of a knot's factor, per step: without forgetting, a few slow steps at high row counts would be
believed for ever, since gamma then never goes there again."""
_LARGEST_SURPRISE = 0.1
"""Relative error beyond which an observation counts no more (Huber): a step that a neighbour made
three times slower moves the model by less than that, what stays half as slow again is learnt in ten or
twenty steps."""


class Correction:
    """Factors of ``num_knots`` knots and of all; 1 at first."""

    def __init__(self, num_knots: int) -> None:
        self._logs = np.zeros(1 + num_knots)
        self._covariance = np.diag([_MACHINE_DOUBT, *[_KNOT_DOUBT] * num_knots])

    @property
    def machine(self) -> float:
        return math.exp(self._logs[0])

    @property
    def knots(self) -> list[float]:
        factors: list[float] = np.exp(self._logs[1:]).tolist()
        return factors

    def observe(self, knots: Sequence[tuple[int, float]], surprise: float) -> None:
        """A step among ``knots``, with weights, took ``exp(surprise)`` times what was predicted."""
        self._forget()
        taught = np.zeros(len(self._logs))
        taught[0] = 1.0
        for knot, weight in knots:
            taught[1 + knot] = weight
        spread = self._covariance @ taught
        variance = float(taught @ spread) + _NOISE
        # What is not believed does not make anything surer either.
        weight = _LARGEST_SURPRISE / max(_LARGEST_SURPRISE, abs(surprise))
        gain = spread * (weight / variance)
        self._logs += gain * surprise
        self._covariance -= np.outer(spread, gain)

    def _forget(self) -> None:
        covariance: np.ndarray[Any, Any] = self._covariance
        self._logs[1:] *= _KNOT_MEMORY
        covariance[1:] *= _KNOT_MEMORY
        covariance[:, 1:] *= _KNOT_MEMORY
        doubt = np.full(len(self._logs), _KNOT_DOUBT * (1.0 - _KNOT_MEMORY**2))
        doubt[0] = _MACHINE_DRIFT
        covariance[np.diag_indices_from(covariance)] += doubt
