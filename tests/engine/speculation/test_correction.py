"""The filter that corrects the cost model's curve."""

from __future__ import annotations

import math

from engine.speculation.correction import Correction


def product(correction: Correction) -> float:
    machine, _, knots = correction.factors()
    return machine * knots[0]


def test_the_first_steps_of_a_kind_count_most_and_outliers_little() -> None:
    fresh, seen = Correction(1), Correction(1)
    for _ in range(200):
        seen.observe([(0, 1.0)], 0.0)
    for correction in (fresh, seen):
        correction.observe([(0, 1.0)], 0.08)
    assert product(fresh) > 1.05 > product(seen) > 1.0
    still = Correction(3)
    for _ in range(5):
        assert still.factors() == (1.0, 1.0, [1.0, 1.0, 1.0])
        still.observe([(1, 1.0)], 0.0)
    wild = Correction(1)
    wild.observe([(0, 1.0)], math.log(30.0))
    assert product(wild) < 1.1


def test_a_step_between_two_knots_teaches_both_by_their_weight() -> None:
    correction = Correction(3)
    correction.observe([(0, 0.75), (1, 0.25)], 0.05)
    _, _, (near, far, neither) = correction.factors()
    assert near > far > neither == 1.0
