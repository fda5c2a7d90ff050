"""Whom a head is asked for: those for whom it adds more than its time costs, and now and then another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.batch_times import BatchTimes, margin_of
from drafters.ledger import Hope, Ledger, expected_tokens
from drafters.tree import EMPTY, DraftTree, chain

RATE = 100.0
"""Tokens per second."""


def timed(seconds: dict[int, float]) -> Ledger:
    """Knows what batches of these sizes take."""
    times = BatchTimes()
    for size, each in seconds.items():
        for _ in range(2):
            times.observe(size, each)
    return Ledger(times.expect)


def hopes(*gains: float, rate: float = RATE) -> list[Hope]:
    """``gains``: beyond the margin that is asked of each."""
    return [Hope(margin_of(len(gains)) * gain, rate) for gain in gains]


def test_a_head_is_asked_where_it_adds_more_than_is_written_meanwhile() -> None:
    ledger = timed({1: 0.01})
    assert ledger.choose(hopes(1.1)) == [0]
    assert ledger.choose(hopes(0.9)) == []
    assert ledger.choose([]) == []


def test_a_batch_is_as_large_as_pays_for_all_of_it() -> None:
    """It takes 1 token's time for one request, 1.5 for two or three, 4 for four."""
    ledger = timed({1: 0.01, 2: 0.015, 4: 0.04})
    assert ledger.choose(hopes(0.8, 0.2, 0.8, 0.1)) == [0, 1, 2], "only together do they pay"
    assert ledger.choose(hopes(0.8, 0.8, 0.8, 0.8)) == [0, 1, 2]
    assert ledger.choose(hopes(3.0, 3.0, 3.0, 3.0)) == [0, 1, 2, 3]
    assert ledger.choose(hopes(0.3, 0.3, 0.3, 0.3)) == []


def test_who_does_not_weigh_cost_is_asked_and_others_pay_for_what_they_add() -> None:
    ledger = timed({1: 1.0, 2: 1.01, 4: 1.04})
    assert ledger.choose([Hope(0.0, 0.0)]) == [0]
    assert ledger.choose([*hopes(1.1), Hope(0.0, 0.0)]) == [0, 1]
    assert ledger.choose([*hopes(0.9), Hope(0.0, 0.0)]) == [1]


def test_what_was_never_timed_is_tried_and_the_first_of_a_size_does_not_count() -> None:
    times = BatchTimes()
    ledger = Ledger(times.expect)
    assert ledger.choose(hopes(0.1)) == [0]
    times.observe(1, 60.0)
    assert ledger.choose(hopes(0.1)) == [0]
    times.observe(1, 0.01)
    assert ledger.choose(hopes(0.1)) == []
    assert ledger.choose(hopes(1.1)) == [0]


@pytest.mark.parametrize("price", [0.01, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_trials_take_a_hundredth_of_what_is_written_however_many_requests(
    price: float, num_requests: int
) -> None:
    ledger = timed(dict.fromkeys((1, 2, 4, 8), price / RATE))
    num_tried, num_steps = 0, 20_000
    for _ in range(num_steps):
        tried = ledger.choose(hopes(*[0.0] * num_requests))
        assert len(tried) <= 1
        num_tried += len(tried)
        ledger.wrote(1)
    share = 0.01 if price < 1.0 else 0.0025  # dear ones are given up, nearly, after eight in vain
    assert 0.9 * min(num_steps, share * num_steps / price) - 1 <= num_tried
    assert num_tried * price <= share * num_steps + 8 * price


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.1), (8, 0.8)], ids=["alone", "one of eight"])
def test_a_trial_costs_what_its_request_has_missed_and_a_call_does_not(
    size: int, seconds: float
) -> None:
    """In a batch that has rested, a trial costs its share."""
    ledger = timed({1: 0.001})
    for _ in range(2):
        ledger.took(size, seconds)
    assert ledger.choose(hopes(0.2)) == [0], "a call costs a tenth of a token"
    num_tried = 0
    for _ in range(7_000):
        num_tried += len(ledger.choose(hopes(0.05)))
        ledger.wrote(1)
    assert 4 * 6 <= num_tried <= 4 * 8, "and a trial ten, of four steps, since it took in a text"


def test_after_a_trial_that_took_long_the_next_one_waits_for_its_price() -> None:
    ledger = timed({1: 0.001})
    for seconds in (60.0, 0.02, 0.02, 0.1):  # the first one of all warms up
        ledger.took(1, seconds)
    assert ledger.choose(hopes(0.05)) == []
    ledger.wrote(1_029)
    assert ledger.choose(hopes(0.05)) == [], "it took ten tokens' time, and goes on for three calls"
    ledger.wrote(2)
    assert ledger.choose(hopes(0.05)) == [0]


def test_dear_trials_get_rare_after_eight_in_vain_until_one_shows_that_drafts_pay() -> None:
    """Each takes ten tokens' time."""
    ledger = timed({1: 0.1})

    def waits() -> int:
        num_steps = 1
        while not ledger.choose(hopes(0.0)):
            ledger.wrote(1)
            num_steps += 1
        return num_steps

    assert [round(waits(), -2) for _ in range(10)] == [1000] * 8 + [4000] * 2
    assert ledger.choose(hopes(11.0)) == [0]
    assert round(waits(), -2) == 1000


@pytest.mark.parametrize(("trial", "asked"), [(0.1, [1, 1, 1, 1, 2, 4, 8, 8]), (0.001, [8, 8])])
def test_where_taking_in_a_text_is_dear_requests_join_by_doubling(
    trial: float, asked: list[int]
) -> None:
    """A call takes a tenth of a token's time, a trial ten tokens' or no more than a call. At first, one
    alone has to show for four steps what drafts gain."""
    ledger = timed({1: 0.001})
    for _ in range(2):
        ledger.took(1, trial)
    rested, found = [True] * 8, []
    for _ in asked:
        chosen = ledger.choose(
            [Hope(2.0, RATE, 0.0, str(at), each) for at, each in enumerate(rested)]
        )
        rested = [each and at not in chosen for at, each in enumerate(rested)]
        found.append(len(chosen))
    assert found == asked


def test_who_has_not_taken_in_all_yet_goes_on() -> None:
    ledger = timed({1: 0.001})
    for _ in range(2):
        ledger.took(1, 0.1)
    behind = [Hope(2.0, RATE, 0.0, name, has_rested=True) for name in "ab"]
    assert [ledger.choose(behind) for _ in range(4)] == [[0]] * 4
    gone = [behind[0]._replace(gain=0.0), behind[1]]
    assert ledger.choose(gone) == [1], "nobody is asked any more"
    ledger.forget("b")
    assert ledger.choose(behind[:1]) == [0], "and again"


def test_what_a_request_has_missed_is_paid_for_over_many_steps() -> None:
    """Taking it in costs ten tokens' time, a call a tenth: who has rested has to gain 0.3 tokens more."""
    ledger = timed({1: 0.001})
    for _ in range(2):
        ledger.took(1, 0.1)
    assert ledger.choose([Hope(0.2, RATE)]) == [0]
    assert ledger.choose([Hope(0.2, RATE, has_rested=True)]) == []
    assert ledger.choose([Hope(0.5, RATE, has_rested=True)]) == [0]


def test_who_has_not_rested_is_asked_beside_one_that_joins() -> None:
    ledger = timed({})
    rested = [True, False, True, True, False]
    chosen = ledger.choose([Hope(2.0, RATE, has_rested=each) for each in rested])
    assert chosen == [0, 1, 4]
    always = [Hope(0.0, 0.0, has_rested=True)] * 3
    assert ledger.choose(always) == [0, 1, 2], "their policy weighs no cost"


def test_a_ledger_says_whether_drafts_pay() -> None:
    ledger = timed({1: 0.01})
    assert ledger.pays, "nothing says otherwise"
    for worthy in (hopes(1.5), [Hope(0.0, 0.0)]):
        for _ in range(255):
            ledger.choose(hopes(0.5))
            assert ledger.has_paid
            assert not ledger.pays
        ledger.choose(hopes(0.5))
        assert not ledger.has_paid
        ledger.choose(worthy)
        assert ledger.pays
        assert ledger.has_paid


def test_those_left_out_are_tried_in_turn_the_most_hopeful_first() -> None:
    ledger = timed({1: 0.01, 2: 0.02})
    found = []
    for _ in range(400):
        found += ledger.choose(hopes(0.1, 0.3, 0.2))
        ledger.wrote(1)
    assert found[0] == 1
    assert set(found) == {0, 1, 2}


def test_a_gain_is_learned_by_what_free_drafts_expect_and_by_request() -> None:
    ledger = timed({})
    first = ledger.gain()
    assert first.expect(0.0) == first.expect(5.0) > 0
    for _ in range(200):
        first.observe(3)
        first.observe(0, 5.0)
    assert first.expect(0.1) > 2.5
    assert first.expect(4.5) < 0.1
    second = ledger.gain()
    assert second.expect(0.0) == pytest.approx(first.expect(0.0), abs=0.3), "shared"
    for _ in range(60):
        second.observe(0)
    assert second.expect(0.0) < 1.0 < first.expect(0.0)


def test_where_nothing_was_tried_as_much_is_expected_as_elsewhere() -> None:
    """A head that brings nothing beside drafts that expect little is not tried long beside others."""
    gain = timed({}).gain()
    untried = gain.expect(4.0)
    for _ in range(40):
        gain.observe(0.0, 0.1)
    assert gain.expect(4.0) < 0.15 * untried
    for _ in range(200):
        gain.observe(3.0, 4.0)
    assert gain.expect(4.0) > 2.5, "what was tried there counts more"
    assert gain.expect(0.1) < 0.4


def test_the_tokens_expected_are_those_of_the_best_path() -> None:
    assert expected_tokens(chain([1, 2, 3]), [0.5, 0.25, 0.25]) == 1.0
    tree = DraftTree([1, 2, 3, 4], [-1, -1, 1, 0], [0] * 4)
    assert expected_tokens(tree, [0.5, 0.4, 0.3, 0.1]) == pytest.approx(0.7)
    assert expected_tokens(EMPTY, []) == 0.0


@given(
    st.lists(st.floats(0.0, 4.0), min_size=1, max_size=7),
    st.tuples(*[st.floats(0.001, 0.1)] * 3).map(sorted),
)
def test_no_other_number_of_requests_gains_more(gains: list[float], seconds: list[float]) -> None:
    ledger = timed(dict(zip((1, 2, 4), seconds, strict=True)))
    chosen = ledger.choose(hopes(*gains))

    def profit(count: int) -> float:
        taken = sorted(gains, reverse=True)[:count]
        return sum(taken) - (RATE * seconds[count.bit_length() - 1] if count else 0.0)

    assert profit(len(chosen)) >= max(map(profit, range(len(gains) + 1))) - 1e-9
    left = [gain for at, gain in enumerate(gains) if at not in chosen]
    assert not chosen or min(gains[at] for at in chosen) >= max(left, default=0.0)


def test_a_new_request_ends_a_rest_only_where_it_may_be_asked() -> None:
    """Eight rest that do not pay for a call of half a token: one more of their kind is no news,
    but for a kind that nobody knows it is."""
    ledger = timed({1: 0.005, 8: 0.04})
    for _ in range(60):
        ledger.gain("known").observe(0.0)

    def rest() -> None:
        ledger.choose(hopes(*[0.0] * 8))
        assert ledger.choose(hopes(*[0.0] * 8)) == []
        assert ledger.rests(8)

    rest()
    ledger.gain("known")
    assert ledger.rests(8)
    ledger.gain("unknown")
    assert not ledger.rests(8)
    rest()
    for _ in range(60):
        ledger.gain("known").observe(3.0)
    assert not ledger.rests(8)


def test_of_many_a_draft_has_to_promise_more() -> None:
    """The most promising of many is the one that was overrated most."""
    ledger = timed({1: 0.01})
    assert ledger.choose([Hope(1.5, RATE)]) == [0]
    others = [Hope(0.0, RATE)] * 7
    ledger.choose([Hope(1.5, RATE), *others])  # a trial
    assert ledger.choose([Hope(1.5, RATE), *others]) == []
    assert ledger.choose([Hope(2.1, RATE), *others]) == [0]
