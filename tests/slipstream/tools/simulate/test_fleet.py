"""Simulated fleets against what can be told by hand, by queueing theory, and by counting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.config import EngineConfig
from slipstream.tools.simulate.fleet import Fleet, Run
from slipstream.tools.simulate.policies import speculative_of
from slipstream.tools.simulate.profile import Costs, Kind, Profile
from slipstream.tools.simulate.results import Figures, figures
from slipstream.tools.simulate.routing import ROUTERS
from slipstream.tools.simulate.studies import plain_capacity, with_prefixes
from slipstream.tools.simulate.work import Arrivals, Work, own_tokens, poisson

FLAT = Costs(((1, 0, 0.01, 1), (65, 0, 0.01, 1)))
SLOPED = Costs(
    ((1, 0, 0.010, 1), (2, 0, 0.011, 1), (101, 0, 0.110, 1)),
    overhead=0.001,
    per_request=0.002,
    per_admission=0.005,
)
PLAIN = {"chat": Kind(((20, 10), (40, 30)))}


def profile(costs: Costs = FLAT, kinds: dict[str, Kind] | None = None, **sizes: int) -> Profile:
    return Profile(costs, kinds or PLAIN, EngineConfig(**({"num_blocks": 512} | sizes)))


def work(at: float, num_prompt: int, num_answer: int, serial: int = 1, kind: str = "chat") -> Work:
    prompt = own_tokens(serial, 0, num_prompt)
    answer = own_tokens(serial, num_prompt, num_answer)
    return Work(at, kind, "tenant", prompt, answer, seed=serial)


def run(
    of: Profile,
    works: Iterable[Work],
    policy: str = "none",
    num_replicas: int = 1,
    routing: str = "least_loaded",
    per_machine: int = 1,
) -> Run:
    router = ROUTERS[routing](num_replicas)
    return Fleet(of, num_replicas, speculative_of(policy), router, per_machine).run(works)


def traffic(rate: float, seconds: float, of: Profile, seed: int = 0) -> list[Work]:
    return list(poisson(of.kinds, Arrivals(rate, seconds, 4, seed=seed)))


def test_a_request_alone_takes_what_the_cost_model_says_of_its_steps() -> None:
    found = run(profile(SLOPED), [work(1.0, 51, 4)])
    (served,) = found.served
    # Admission; the prompt's step of 51 rows: 0.010 .. + 49 thousandths from the second row on.
    first = 0.001 + (0.011 + 49 * 0.001) + 0.002 + 0.005
    decode = 0.001 + 0.010 + 0.002
    assert served.first_token == pytest.approx(1.0 + first)
    assert served.end == pytest.approx(1.0 + first + 3 * decode)


def test_a_prompt_runs_in_chunks_beside_those_who_write() -> None:
    of = profile(SLOPED, max_num_batched_tokens=64, max_num_seqs=8, prefill_chunk=40)
    _, long = run(of, [work(0.0, 2, 100), work(0.5, 100, 1, serial=2)]).served
    # 40, 40 and 20 rows beside the one that writes and samples in every step; the long one in its last.
    chunks = [0.001 + 0.011 + rows * 0.001 for rows in (39, 39, 19)]
    # Admission shares the cores with a step.
    expected = sum(chunks) + 4 * 0.002 + 2 * 0.005
    under_way = 0.001 + 0.010 + 0.002
    assert expected <= long.first_token - long.work.at <= expected + under_way


def test_what_a_server_does_for_new_requests_keeps_the_step_under_way_from_its_cores() -> None:
    step, admission = 0.001 + 0.010 + 0.002, 0.005
    of = profile(SLOPED, max_num_seqs=1)
    alone = run(of, [work(0.0, 1, 3)]).served[0]
    assert alone.end == pytest.approx(admission + 3 * step)
    # Two come while the first is in its second step, one right after the other.
    at = admission + 1.5 * step
    works = [work(0.0, 1, 3), work(at, 1, 1, serial=2), work(at, 1, 1, serial=3)]
    first, second, third = run(of, works).served
    assert first.end == pytest.approx(admission + 3 * step + 2 * admission)
    # Each of them is in before there is a seat for it.
    assert second.end == pytest.approx(first.end + step)
    assert third.end == pytest.approx(first.end + 2 * step)
    # With a seat, the second begins when the server has taken it in: half as fast, beside a step.
    of = profile(SLOPED, max_num_seqs=8)
    (_, second) = run(of, [work(0.0, 1, 30), work(at, 1, 1, serial=2)]).served
    assert second.first_token - at >= 2 * admission + step


@pytest.mark.parametrize(
    ("policy", "routing"),
    [("none", "round_robin"), ("fixed:3", "least_loaded"), ("goodput", "affinity")],
)
def test_every_request_ends_once_with_all_its_tokens(policy: str, routing: str) -> None:
    kinds = {"edit": Kind(((40, 12), (90, 25)), 1.0, 16, 0.9, (0.8, 0.9))}
    # So few blocks that requests lose theirs, and so small a queue that some are refused.
    of = profile(FLAT, kinds, num_blocks=24, max_num_seqs=6, max_num_waiting=4)
    works = traffic(250.0, 1.2, of)
    found = run(of, works, policy, 3, routing)
    assert [each.work for each in found.served] == works
    ended = [each for each in found.served if each.end is not None]
    refused = [each for each in found.served if each.end is None]
    assert refused
    assert all(each.first_token is None for each in refused)
    assert any(each.num_preemptions for each in ended)
    assert all(each.work.at < (each.first_token or 0.0) <= (each.end or 0.0) for each in ended)
    written = sum(each.num_emitted_tokens for each in found.totals)
    assert written == sum(len(each.work.completion_token_ids) for each in ended)


def test_what_never_fits_is_refused_and_the_rest_goes_on() -> None:
    of = profile(num_blocks=4)
    big, small = run(of, [work(0.0, 60, 10), work(0.0, 20, 10, serial=2)]).served
    assert big.end is None
    assert small.end == pytest.approx(10 * 0.01)


def test_littles_law() -> None:
    of = profile(max_num_seqs=4)
    found = run(of, traffic(40.0, 6.0, of), num_replicas=2)
    ends = [(each.work.at, 1) for each in found.served]
    ends += [(each.end, -1) for each in found.served if each.end is not None]
    events = sorted(ends)
    area, num_open = 0.0, 0
    for (at, change), (until, _) in pairwise(events):
        num_open += change
        area += num_open * (until - at)
    whole = figures(found).whole
    assert figures(found).num_refused == 0
    mean_open = area / found.seconds
    rate = len(found.served) / found.seconds
    assert mean_open == pytest.approx(rate * whole.mean)
    assert mean_open > 2 * 4 * 0.5  # there was a queue worth counting


def test_one_seat_is_a_queue_of_poisson_arrivals_and_constant_service() -> None:
    service, load = 0.01, 0.7
    kinds = {"chat": Kind(((10, 1),))}
    of = profile(FLAT, kinds, max_num_seqs=1, max_num_waiting=4000)
    found = run(of, traffic(load / service, 45.0, of))
    pollaczek_khinchine = service + load * service / (2 * (1 - load))
    assert figures(found).whole.mean == pytest.approx(pollaczek_khinchine, rel=0.08)
    assert figures(found).utilisation == pytest.approx(load, rel=0.05)


def test_drafts_that_are_always_right_save_steps_and_wrong_ones_only_cost_rows() -> None:
    rates = {"right": 1.0, "wrong": 0.0}
    kinds = {kind: Kind(((10, 40),), acceptance=(rate,)) for kind, rate in rates.items()}
    of = profile(SLOPED, kinds)
    steps, seconds = {}, {}
    for kind in kinds:
        found = run(of, [work(0.0, 10, 40, kind=kind)], "fixed:3")
        steps[kind], seconds[kind] = found.totals[0].num_steps, found.seconds
        assert found.totals[0].num_emitted_tokens == 40
    assert steps == {"right": 10, "wrong": 40}
    assert seconds["right"] < seconds["wrong"]
    plain = run(of, [work(0.0, 10, 40, kind="wrong")])
    assert plain.seconds < seconds["wrong"]


def test_goodput_is_the_engines_own_and_yields_where_rows_are_dear() -> None:
    kinds = {"edit": Kind(((10, 60),), acceptance=(0.9,))}
    free = profile(FLAT, kinds)
    dear = profile(Costs(((1, 0, 0.01, 1), (65, 0, 0.65, 1))), kinds)
    drafted = figures(run(free, traffic(3.0, 5.0, free), "goodput"))
    yielded = figures(run(dear, traffic(0.5, 30.0, dear), "goodput"))
    assert drafted.tokens_per_step > 3
    assert yielded.mean_gamma < 0.3


def test_acceptance_is_as_often_as_the_profile_says() -> None:
    kinds = {"edit": Kind(((10, 400),), 1.0, 0, 0.5, (0.8, 0.5))}
    of = profile(FLAT, kinds)
    found = figures(run(of, traffic(2.0, 8.0, of), "fixed:2"))
    assert found.mean_gamma == pytest.approx(0.5 * 2, rel=0.05)
    assert found.accepted_per_step == pytest.approx(0.5 * (0.8 + 0.8 * 0.5), rel=0.05)


def test_affinity_raises_the_hits_of_the_prefix_cache() -> None:
    of = with_prefixes(profile(FLAT, {"chat": Kind(((40, 10),))}, num_blocks=60), 160)
    works = list(poisson(of.kinds, Arrivals(40.0, 4.0, num_tenants=24, zipf=0.0)))
    hits = {
        routing: figures(run(of, works, num_replicas=6, routing=routing)).prefix_hit_rate
        for routing in ROUTERS
    }
    assert hits["affinity"] > 1.5 * max(hits["round_robin"], hits["least_loaded"])


def test_a_busy_neighbour_slows_steps_by_what_was_measured() -> None:
    of = profile(replace(FLAT, with_neighbour=1.5))
    two = [work(0.0, 10, 20), work(0.0, 10, 20, serial=2)]
    apart = run(of, two, num_replicas=2)
    together = run(of, two, num_replicas=2, per_machine=2)
    assert apart.seconds == pytest.approx(0.2)
    # Who begins first has no neighbour in the first step.
    assert together.seconds == pytest.approx(0.3)


def test_equal_seeds_give_equal_figures_and_others_do_not() -> None:
    kinds = {"edit": Kind(((40, 12), (90, 25)), 1.0, 16, 0.9, (0.8, 0.9))}
    of = profile(SLOPED, kinds)

    def found(seed: int) -> Figures:
        works = traffic(20.0, 3.0, of, seed=seed)
        return figures(run(of, works, "goodput", 2, "affinity"))

    assert found(1) == found(1)
    assert found(1) != found(2)


def test_a_fleet_costs_its_replicas_hours_over_what_it_wrote() -> None:
    of = profile()
    found = figures(run(of, [work(0.0, 10, 50)], num_replicas=3), price_per_hour=7200.0)
    assert found.cost_per_million == pytest.approx(3 * 0.5 * 2.0 / 50 * 1e6)


def test_the_capacity_without_drafts_is_what_full_seats_serve() -> None:
    of = profile(kinds={"chat": Kind(((10, 10),))}, max_num_seqs=10, max_num_waiting=90)
    # Ten at a time, ten steps each.
    assert plain_capacity(of) == pytest.approx(100.0, rel=0.15)
