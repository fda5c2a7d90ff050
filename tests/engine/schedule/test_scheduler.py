"""Schedules without a model: which requests get rows, which wait, which have to go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request.params import GenerationRequest, SamplingParams, Tenant
from engine.sampling.state import SamplingState
from engine.schedule.request import Plan, Request
from engine.schedule.scheduler import BlockRows, FairQueue, NoRows, Scheduler
from kvpool.block_pool import BlockPool
from worlds.lanes import examples

BLOCK_SIZE = 4


def make(
    name: str,
    num_prompt: int = 8,
    max_tokens: int = 50,
    priority: int = 0,
    tenant: Tenant = Tenant(),  # noqa: B008  (frozen)
    order: int = 0,
) -> Request:
    params = GenerationRequest(
        name,
        tuple(range(num_prompt)),
        SamplingParams(max_tokens=max_tokens),
        priority=priority,
        tenant=tenant,
    )
    return Request(params, SamplingState(params, (), 1000, 1000), order)


class World:
    """A scheduler, its blocks, and a target that answers every anchor with one token. Counts prompts that
    were started and tokens written by tenant."""

    def __init__(
        self,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        prefill_chunk: int = 16,
        rows: BlockRows = NoRows(),  # noqa: B008  (has no state)
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens, prefill_chunk, rows
        )
        self.num_arrived = 0
        self.served: dict[str, int] = defaultdict(int)
        self.started: list[str] = []

    def add(self, name: str, *sizes: int, **asked: Any) -> Request:
        """As ``make``, in the order of arrival."""
        request = make(name, *sizes, order=self.num_arrived, **asked)
        self.num_arrived += 1
        self.scheduler.submit(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        for request in plan.admitted:
            self.served[request.params.tenant.name] += request.num_prompt_tokens
            self.started.append(request.request_id)
        for each in plan.scheduled:
            request = each.request
            request.commit(each.num_known, [1] if each.samples else [])
            self.served[request.params.tenant.name] += int(each.samples)
            if request.num_tokens_left == 0:
                self.scheduler.remove(request)
        return plan

    @property
    def waiting(self) -> list[str]:
        return ids(self.scheduler.waiting)


def rows_of(plan: Plan) -> dict[str, int]:
    return {each.request.request_id: each.num_known for each in plan.scheduled}


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_request_catches_up_with_its_own_length() -> None:
    world = World(prefill_chunk=16)
    request = world.add("r", num_prompt=40)
    assert [rows_of(world.step())["r"] for _ in range(5)] == [16, 16, 8, 1, 1]
    assert request.num_output_tokens == 3


def test_rows_stay_within_the_budget_and_the_rest_is_spare() -> None:
    world = World(max_num_batched_tokens=20, prefill_chunk=16)
    plan = world.step()
    assert (plan.scheduled, plan.preempted, plan.num_rows, plan.spare_rows) == ([], [], 0, 20)
    world.add("long", num_prompt=30)
    world.add("other", num_prompt=30)
    plan = world.scheduler.plan()
    assert rows_of(plan) == {"long": 16, "other": 4}
    assert (plan.num_rows, plan.spare_rows) == (20, 0)


def test_a_long_prompt_leaves_every_decoding_request_its_row() -> None:
    world = World(max_num_batched_tokens=8, prefill_chunk=1000, max_num_seqs=4)
    for name in "abc":
        world.add(name, num_prompt=1)
    world.step()
    world.add("long", num_prompt=90, priority=-1)
    for _ in range(10):
        assert rows_of(world.step()) == {"long": 5, "a": 1, "b": 1, "c": 1}


def test_a_better_priority_takes_the_seat_of_the_worst_and_an_equal_one_does_not() -> None:
    world = World(max_num_seqs=3)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        world.add(name, priority=priority)
    assert world.step().preempted == []
    assert ids(world.scheduler.running) == ["d", "b", "a"]
    assert world.waiting == ["c"]
    world.add("important", priority=-1)
    (late,) = world.step().preempted
    assert (late.request_id, late.is_running) == ("a", False)
    assert ids(world.scheduler.running) == ["d", "important", "b"]
    assert world.waiting == ["a", "c"]


def test_shortage_preempts_the_lowest_ranked_and_recomputes_it_whole() -> None:
    """It comes back before younger ones."""
    world = World(num_blocks=6, max_num_seqs=2)
    first, second = world.add("first"), world.add("second")
    world.add("third", num_prompt=4)
    while not second.num_preemptions:
        world.step()
        assert first.num_preemptions == 0
    assert second.num_computed_tokens == 0
    assert world.waiting == ["second", "third"]
    known = len(second.token_ids)
    assert known > 8
    world.scheduler.remove(first)
    assert rows_of(world.step())["second"] == known


def test_admission_waits_until_the_whole_text_fits_and_does_not_overtake() -> None:
    world = World(num_blocks=10, prefill_chunk=4)
    world.add("large", num_prompt=32)
    world.step()
    world.add("next", num_prompt=12)
    world.add("tiny", num_prompt=1)
    world.step()
    # Blocks are free, but they are promised to the first prompt.
    assert world.pool.num_available >= 3
    assert world.waiting == ["next", "tiny"]


def test_cached_tokens_need_no_rows_but_one_always_runs() -> None:
    world = World()
    first = world.add("first", num_prompt=12)
    world.step()
    world.pool.promote("first", first.token_ids, 12)
    again = world.add("again", num_prompt=12)
    assert rows_of(world.step())["again"] == 4
    assert again.num_cached_tokens == 8


class Rows:
    """Rows of as many tokens as it is told, by request; looks at the blocks of those that leave."""

    def __init__(self, **usable: int) -> None:
        self.usable = usable
        self.pool: BlockPool | None = None
        self.left: list[tuple[str, int]] = []

    def num_usable_tokens(self, request: Request, block_ids: Sequence[int]) -> int:
        assert len(block_ids) * BLOCK_SIZE <= len(request.token_ids)
        return self.usable.get(request.request_id, len(request.token_ids))

    def leave_blocks(self, request: Request) -> None:
        if self.pool is not None:
            table = self.pool.block_table(request.request_id)
            self.left.append((request.request_id, len(table)))


def test_what_of_a_cached_prefix_is_of_no_use_gets_rows_and_blocks() -> None:
    world = World(num_blocks=7, max_num_batched_tokens=64, rows=Rows(cut=4, none=0))
    first = world.add("first", num_prompt=12)
    world.step()
    world.pool.promote("first", first.token_ids, 12)
    world.scheduler.remove(first)
    cut, none = world.add("cut", num_prompt=12), world.add("none", num_prompt=12)
    assert rows_of(world.scheduler.plan()) == {"cut": 8, "none": 12}
    assert (cut.num_cached_tokens, none.num_cached_tokens) == (4, 0)
    assert world.pool.counts() == {"free": 0, "draft": 0, "committed": 6, "cached": 1}
    world.pool.check_integrity()


@pytest.mark.parametrize("usable", [0, 4, 8, 12])
def test_blocks_that_are_promised_count_what_has_to_be_computed_again(usable: int) -> None:
    """A prompt in progress is never preempted by one that was let in beside it."""
    world = World(num_blocks=10, prefill_chunk=1, rows=Rows(again=usable))
    first = world.add("first", num_prompt=16)
    for _ in range(16):
        world.step()
    world.pool.promote("first", first.token_ids, 16)
    world.scheduler.remove(first)
    world.add("again", num_prompt=16, max_tokens=1)
    late = world.add("late", num_prompt=24)
    while not late.num_output_tokens:
        assert world.step().preempted == []
        world.pool.check_integrity()


def test_who_leaves_its_blocks_is_told_of_while_it_has_them() -> None:
    rows = Rows()
    world = World(num_blocks=6, max_num_seqs=2, rows=rows)
    rows.pool = world.pool
    first, second = world.add("first"), world.add("second")
    while not second.num_preemptions:
        world.step()
    assert rows.left == [("second", 3)]
    world.scheduler.remove(second)
    assert len(rows.left) == 1, "it has no blocks any more"
    world.scheduler.remove(first)
    assert rows.left[1:] == [("first", 4)]


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_a_removed_request_holds_nothing(state: str) -> None:
    world = World(max_num_seqs=1)
    request = world.add("r")
    if state != "waiting":
        world.step()
    if state == "preempted":
        important = world.add("important", priority=-1)
        world.step()
        assert request.num_preemptions == 1
        world.scheduler.remove(important)
    world.scheduler.remove(request)
    assert world.pool.num_available == 100
    assert list(world.scheduler.requests()) == []


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(-1, 1), st.integers(0, 15)),
        min_size=1,
        max_size=8,
    ),
    st.integers(13, 20),
    st.integers(1, 4),
    st.integers(0, 10),
    st.integers(1, 20),
)
def test_everyone_is_served_in_the_end(
    arrivals: list[tuple[int, int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    num_spare: int,
    prefill_chunk: int,
) -> None:
    """No livelock: pools that hold little more than one request, preemption after preemption."""
    world = World(num_blocks, max_num_seqs, max_num_seqs + num_spare, prefill_chunk)
    requests: list[Request] = []
    for step in range(2000):
        for index, (num_prompt, max_tokens, priority, at) in enumerate(arrivals):
            if at == step:
                requests.append(world.add(f"r{index}", num_prompt, max_tokens, priority))
        best = world.scheduler.running[:1]
        progress = best[0].num_computed_tokens if best else 0
        plan = world.step()
        assert plan.num_rows <= world.scheduler.max_num_batched_tokens
        assert plan.num_rows == sum(each.num_known for each in plan.scheduled)
        assert all(each.num_known >= 1 for each in plan.scheduled)
        assert len({id(each.request) for each in plan.scheduled}) == len(plan.scheduled)
        # Whoever leads, and is not overtaken by somebody better, moves on.
        if best and best[0] not in plan.preempted:
            assert best[0].num_computed_tokens > progress
        if len(requests) == len(arrivals) and not list(world.scheduler.requests()):
            break
    assert not any(request.is_running for request in requests)
    assert world.pool.num_available == num_blocks


# --- tenants ---

LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)
LONGEST = 24


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 5.0]), LENGTHS), min_size=2, max_size=4),
    st.integers(1, 5),
    st.integers(20, 120),
)
def test_tenants_that_wait_all_along_are_served_by_weight(
    tenants: list[tuple[float, list[tuple[int, int]]]], max_num_seqs: int, num_steps: int
) -> None:
    """The bound of the queue's own words: at every moment, tokens over weight of two such tenants differ
    by no more than what a tenant may have running at a time, over the smaller weight."""
    world = World(1000, max_num_seqs, 64)
    known = [Tenant(f"t{rank}", weight) for rank, (weight, _) in enumerate(tenants)]
    num_sent: dict[str, int] = defaultdict(int)
    bound = max_num_seqs * LONGEST / min(weight for weight, _ in tenants)
    for _ in range(num_steps):
        for tenant, (_, lengths) in zip(known, tenants, strict=True):
            while sum(name.startswith(tenant.name) for name in world.waiting) <= max_num_seqs:
                order = num_sent[tenant.name]
                lengths_now = lengths[order % len(lengths)]
                world.add(f"{tenant.name}-{order}", *lengths_now, tenant=tenant)
                num_sent[tenant.name] += 1
        world.step()
        shares = [world.served[each.name] / each.weight for each in known]
        assert max(shares) - min(shares) <= bound
    for each in known:  # first come, first served
        orders = [int(name.split("-")[1]) for name in world.started if name.startswith(each.name)]
        assert orders == sorted(orders)


def test_who_was_away_has_saved_nothing_up() -> None:
    world = World(1000, max_num_seqs=1)
    served = []
    for tenant in (Tenant("busy"), Tenant("away")):
        for number in range(100):
            world.add(f"{tenant.name}-{number}", 4, 2, tenant=tenant)
        for _ in range(60):
            world.step()
        served.append(world.served["busy"])
    gained = served[1] - served[0]
    assert gained > 60  # not: the other has caught up on what it never asked for
    assert abs(gained - world.served["away"]) <= 2 * LONGEST


def test_priority_comes_before_fairness() -> None:
    world = World(max_num_seqs=1)
    first, other = Tenant("first"), Tenant("other")
    world.add("first", max_tokens=4, tenant=first)
    world.step()
    for number in range(3):
        world.add(f"first-{number}", max_tokens=4, priority=-1, tenant=first)
        world.add(f"other-{number}", max_tokens=4, tenant=other)
    while world.scheduler.waiting:
        world.step()
    assert world.started[1:4] == ["first-0", "first-1", "first-2"]


def test_what_is_recomputed_is_charged_once() -> None:
    queue = FairQueue()
    first, _, other, _ = requests = [
        make(name, num_prompt, 4, tenant=Tenant(name[0]), order=order)
        for order, (name, num_prompt) in enumerate((("t1", 8), ("t2", 1), ("u1", 10), ("u2", 1)))
    ]
    for request in requests:
        queue.push(request)
    for num_new, num_written in ((8, 1), (9, 0)):
        assert queue.first() is first
        queue.start(first)
        first.start(0)
        first.commit(num_new, [1] * num_written)
        queue.charge(first)
        if num_written:
            assert queue.first() is other
            first.preempt()
            queue.push(first)
            queue.start(other)
    # 8 + 1 tokens against 10: not twice as many.
    assert ids(queue) == ["t2", "u2"]


def test_without_tenants_it_is_a_queue() -> None:
    queue = FairQueue()
    for order, priority in enumerate((1, 0, 1)):
        queue.push(make(str(order), priority=priority, order=order))
    assert ids(queue) == ["1", "0", "2"]
    assert len(queue) == 3
    for request in list(queue):
        assert queue.first() is request
        queue.remove(request)
    assert queue.first() is None
    assert len(queue) == 0
