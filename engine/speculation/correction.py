"""Corrects the cost model's curve by the steps that run, in compiled code: every step teaches it.

A Kalman filter over the logarithms of factors of all steps, of those with drafts, and of the curve's
knots; they are 1 at first. One factor holds for all steps and follows the machine (clocks, neighbours),
one for those where several requests' drafts are verified; one per knot follows what start-up got wrong
about the curve's shape, and drifts back to 1 while its rows are not met. The filter knows how sure it is
of each, so the first steps of a kind count most, and it knows that a machine that slowed down as a whole
slowed down at the row counts, too, that are not visited meanwhile.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from compiled.loops import Loop
from compiled.records import Float64s, Memory, address_of

_NOISE = 0.07**2
"""Variance of a step's seconds about their mean, relative."""
_MACHINE_DOUBT = 0.3**2
"""The machine may have been as much slower or faster when it was measured: what the first steps take is
its doing, before it is a knot's."""
_MACHINE_DRIFT = 0.04**2
"""Per step: neighbours slow a shared machine down within a few, and by more than any knot is wrong."""
_KNOT_DOUBT = 0.05**2
_DRAFTS_DOUBT = 0.05**2
_KNOT_MEMORY = 1.0 - 1.0 / 400
"""Share of a knot's factor that a step keeps: without forgetting, a few slow steps at high row counts
would be believed for ever, since gamma then never goes there again."""
_LARGEST_SURPRISE = 0.1
"""Relative error of a step beyond which it counts no more (Huber): one that a neighbour made three times
slower moves the model by less than that, what stays half as slow again is learnt in ten or twenty."""


class Filter(Protocol):
    """``size`` factors, the machine's first, that of drafts second: their logarithms, themselves, and the
    ``covariance`` of the logarithms, row by row. A step forgets, ``memory``, and adds ``drift`` to the
    variances. ``design``: by how much a step shows each; ``spread``: room for as many."""

    logs: Float64s
    factors: Float64s
    covariance: Float64s
    memory: Float64s
    drift: Float64s
    design: Float64s
    spread: Float64s
    surprise: Float64s
    size: int


def _learn(f: Filter) -> None:
    """The step took ``exp(surprise[0])`` times as long as predicted."""
    variance, surprise = _NOISE, f.surprise[0]
    for row in range(f.size):
        f.logs[row] *= f.memory[row]
        total = 0.0
        for column in range(f.size):
            at = row * f.size + column
            f.covariance[at] *= f.memory[row] * f.memory[column]
            if row == column:
                f.covariance[at] += f.drift[row]
            total += f.covariance[at] * f.design[column]
        f.spread[row] = total
        variance += total * f.design[row]
    # What is not believed does not make anything surer either.
    weight = _LARGEST_SURPRISE / max(_LARGEST_SURPRISE, abs(surprise)) / variance
    for row in range(f.size):
        for column in range(f.size):
            f.covariance[row * f.size + column] -= f.spread[row] * f.spread[column] * weight
        f.logs[row] += f.spread[row] * weight * surprise
        f.factors[row] = math.exp(f.logs[row])


_learn_step = Loop(_learn)


class Correction:
    """The factors of ``num_knots`` knots, and of the steps."""

    def __init__(self, num_knots: int) -> None:
        size = 2 + num_knots
        doubts = [_MACHINE_DOUBT, _DRAFTS_DOUBT, *[_KNOT_DOUBT] * num_knots]
        memory = [1.0, *[_KNOT_MEMORY] * (1 + num_knots)]
        drift = [doubt * (1.0 - kept**2) for doubt, kept in zip(doubts, memory, strict=True)]
        drift[0] = _MACHINE_DRIFT
        covariance = [0.0] * size**2
        covariance[:: size + 1] = doubts
        none = [0.0] * size
        logs, self._factors, self._design, spread, self._surprise = (
            array("d", each) for each in (none, [1.0] * size, none, none, [0.0])
        )
        matrices = (array("d", each) for each in (covariance, memory, drift))
        self._numbers = [logs, self._factors, *matrices, self._design, spread, self._surprise]
        self._told = Memory(Filter)
        self._told.fill(*map(address_of, self._numbers), size)
        self._learn = _learn_step.compile()

    def factors(self) -> tuple[float, float, list[float]]:
        """Returns the factors of all steps, of those with drafts, and of each knot."""
        machine, drafts, *knots = self._factors
        return machine, drafts, knots

    def observe(
        self, knots: Sequence[tuple[int, float]], surprise: float, has_drafts: bool = False
    ) -> None:
        """Learns that a step among ``knots``, with weights, took ``exp(surprise)`` times as long as
        predicted."""
        design = self._design
        design[0], design[1], self._surprise[0] = 1.0, float(has_drafts), surprise
        for knot, weight in knots:
            design[2 + knot] = weight
        self._learn(self._told.address)
        for knot, _ in knots:
            design[2 + knot] = 0.0
