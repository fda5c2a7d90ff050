"""Tenants share the engine by weight: on schedules of a scheduler without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request.params import GenerationRequest, SamplingParams, Tenant
from engine.sampling.state import SamplingState
from engine.schedule.fair_queue import FairQueue
from engine.schedule.request import Request
from engine.schedule.scheduler import Scheduler
from kvpool.block_pool import BlockPool
from worlds.lanes import examples

BLOCK_SIZE = 4


class World:
    """A scheduler with blocks enough, and a target that answers every anchor with one token. Counts what
    it sees: prompts that were started, and tokens written, by tenant."""

    def __init__(self, max_num_seqs: int, num_blocks: int = 1000) -> None:
        self.scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE), BLOCK_SIZE, max_num_seqs, 64, prefill_chunk=16
        )
        self.served: dict[str, int] = defaultdict(int)
        self.started: list[str] = []
        self.num_arrived = 0

    def add(
        self,
        tenant: Tenant,
        num_prompt: int = 4,
        max_tokens: int = 4,
        priority: int = 0,
    ) -> Request:
        request = make(tenant, self.num_arrived, num_prompt, max_tokens, priority)
        self.num_arrived += 1
        self.scheduler.submit(request)
        return request

    def step(self) -> None:
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

    def num_waiting(self, tenant: Tenant) -> int:
        return sum(each.params.tenant.name == tenant.name for each in self.scheduler.waiting)


def make(tenant: Tenant, order: int, num_prompt: int, max_tokens: int, priority: int) -> Request:
    params = GenerationRequest(
        f"{tenant.name}-{order}",
        tuple(range(num_prompt)),
        SamplingParams(max_tokens=max_tokens),
        priority=priority,
        tenant=tenant,
    )
    request = Request(params, SamplingState(params, (), 1000, 1000))
    request.arrival_order = order
    return request


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
    world = World(max_num_seqs)
    known = [Tenant(f"t{rank}", weight) for rank, (weight, _) in enumerate(tenants)]
    num_sent: dict[str, int] = defaultdict(int)
    bound = max_num_seqs * LONGEST / min(weight for weight, _ in tenants)
    for _ in range(num_steps):
        for tenant, (_, lengths) in zip(known, tenants, strict=True):
            while world.num_waiting(tenant) <= max_num_seqs:
                world.add(tenant, *lengths[num_sent[tenant.name] % len(lengths)])
                num_sent[tenant.name] += 1
        world.step()
        shares = [world.served[each.name] / each.weight for each in known]
        assert max(shares) - min(shares) <= bound
    for each in known:  # first come, first served
        orders = [int(name.split("-")[1]) for name in world.started if name.startswith(each.name)]
        assert orders == sorted(orders)


def test_who_was_away_has_saved_nothing_up() -> None:
    world = World(max_num_seqs=1)
    busy, away = Tenant("busy"), Tenant("away")
    for _ in range(100):
        world.add(busy, max_tokens=2)
    for _ in range(60):
        world.step()
    before = world.served["busy"]
    for _ in range(100):
        world.add(away, max_tokens=2)
    for _ in range(60):
        world.step()
    gained = world.served["busy"] - before
    assert gained > 60  # not: the other has caught up on what it never asked for
    assert abs(gained - world.served["away"]) <= 2 * LONGEST


def test_priority_comes_before_fairness() -> None:
    world = World(max_num_seqs=1)
    world.add(Tenant("first"))
    world.step()
    for _ in range(3):
        world.add(Tenant("first"), priority=-1)
        world.add(Tenant("other"))
    while world.scheduler.waiting:
        world.step()
    assert [name.split("-")[0] for name in world.started[1:4]] == ["first"] * 3


def test_what_is_recomputed_is_charged_once() -> None:
    queue = FairQueue()
    first, _, other, _ = requests = [
        make(Tenant(name), order, num_prompt, 4, 0)
        for order, (name, num_prompt) in enumerate((("t", 8), ("t", 1), ("u", 10), ("u", 1)))
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
    assert tenants_of(list(queue)) == ["t", "u"]


def test_without_tenants_it_is_a_queue() -> None:
    queue = FairQueue()
    requests = [make(Tenant(), order, 1, 1, priority) for order, priority in enumerate((1, 0, 1))]
    for request in requests:
        queue.push(request)
    assert list(queue) == [requests[1], requests[0], requests[2]]
    assert len(queue) == 3
    for request in list(queue):
        assert queue.first() is request
        queue.remove(request)
    assert queue.first() is None
    assert len(queue) == 0


def tenants_of(requests: Sequence[Request]) -> list[str]:
    return [each.params.tenant.name for each in requests]
