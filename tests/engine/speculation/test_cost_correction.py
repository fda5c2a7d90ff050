from __future__ import annotations

import math
import random

import pytest

from engine.speculation.cost_correction import Correction


def test_nothing_is_corrected_at_first_and_equal_steps_change_nothing() -> None:
    correction = Correction(3)
    for _ in range(5):
        assert (correction.machine, correction.knots) == (1.0, [1.0, 1.0, 1.0])
        correction.observe([(1, 1.0)], 0.0)


def test_what_all_knots_share_is_the_machines_and_the_rest_is_the_knots() -> None:
    """Knot 0 takes 1.2 times what was predicted, knot 1 1.5 times."""
    correction = Correction(2)
    rng = random.Random(1)
    truth = (math.log(1.2), math.log(1.5))
    for _ in range(300):
        knot = rng.randrange(2)
        told = math.log(correction.machine * correction.knots[knot])
        correction.observe([(knot, 1.0)], truth[knot] - told + rng.gauss(0.0, 0.05))
    factors = [correction.machine * each for each in correction.knots]
    assert factors == pytest.approx([1.2, 1.5], rel=0.05)
    assert correction.machine == pytest.approx(math.sqrt(1.2 * 1.5), rel=0.1)


def test_a_slower_machine_is_slower_at_knots_that_nobody_visits() -> None:
    correction = Correction(2)
    for _ in range(1500):
        told = math.log(correction.machine * correction.knots[0])
        correction.observe([(0, 1.0)], math.log(2.0) - told)
    assert correction.machine * correction.knots[1] == pytest.approx(2.0, rel=0.05)


def test_the_first_steps_of_a_kind_count_most_and_outliers_little() -> None:
    fresh, seen = Correction(1), Correction(1)
    for _ in range(200):
        seen.observe([(0, 1.0)], 0.0)
    for correction in (fresh, seen):
        correction.observe([(0, 1.0)], 0.08)
    assert fresh.machine * fresh.knots[0] > 1.03 > seen.machine * seen.knots[0] > 1.0
    wild = Correction(1)
    wild.observe([(0, 1.0)], math.log(30.0))
    assert wild.machine * wild.knots[0] < 1.1


def test_a_step_between_two_knots_teaches_both_by_their_weight() -> None:
    correction = Correction(3)
    correction.observe([(0, 0.75), (1, 0.25)], 0.05)
    near, far, neither = correction.knots
    assert near > far > neither == 1.0
