"""The scheduler against a plain count of blocks: who gets rows, who waits, who has to go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request.params import GenerationRequest, SamplingParams
from engine.sampling.state import SamplingState
from engine.schedule.request import Request
from engine.schedule.scheduler import Plan, Scheduler
from worlds.lanes import examples

BLOCK_SIZE = 4


@dataclass
class CountedBlocks:
    """Blocks without identities; ``cached`` tokens are offered to the next request that opens."""

    num_available: int
    cached: int = 0
    held: dict[str, int] = field(default_factory=dict)
    salts: list[str] = field(default_factory=list)
    opened: set[str] = field(default_factory=set)

    def open(
        self,
        request_id: str,
        token_ids: list[int],
        cache_salt: str,
        max_cached_tokens: int,
        is_new: bool,
    ) -> int:
        assert request_id not in self.held
        assert is_new == (request_id not in self.opened)
        self.opened.add(request_id)
        assert max_cached_tokens < len(token_ids)
        found = min(self.cached, max_cached_tokens) // BLOCK_SIZE
        self.salts.append(cache_salt)
        self.held[request_id] = found
        self.num_available -= found
        return found * BLOCK_SIZE

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        num_new = max(0, -(-num_tokens // BLOCK_SIZE) - self.held[request_id])
        if num_new > self.num_available:
            return False
        self.held[request_id] += num_new
        self.num_available -= num_new
        return True

    def free(self, request_id: str) -> None:
        self.num_available += self.held.pop(request_id)


class World:
    """A scheduler, its blocks, and a target that answers every anchor with one token."""

    def __init__(
        self,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        prefill_chunk: int = 16,
    ) -> None:
        self.blocks = CountedBlocks(num_blocks)
        self.scheduler = Scheduler(
            self.blocks, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens, prefill_chunk
        )
        self.num_arrived = 0

    def add(
        self, request_id: str, num_prompt: int = 8, max_tokens: int = 50, priority: int = 0
    ) -> Request:
        params = GenerationRequest(
            request_id,
            tuple(range(num_prompt)),
            SamplingParams(max_tokens=max_tokens),
            priority=priority,
            cache_salt=f"cache_salt of {request_id}",
        )
        request = Request(params, SamplingState(params, (), 1000, 1000))
        request.arrival_order = self.num_arrived
        self.num_arrived += 1
        self.scheduler.submit(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        for each in plan.scheduled:
            request = each.request
            request.commit(each.num_known, [1] if each.samples else [])
            if request.num_tokens_left == 0:
                self.scheduler.remove(request)
        return plan


def rows_of(plan: Plan) -> dict[str, int]:
    return {each.request.request_id: each.num_known for each in plan.scheduled}


def ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_request_catches_up_with_its_own_length() -> None:
    world = World(prefill_chunk=16)
    request = world.add("r", num_prompt=40)
    assert [rows_of(world.step())["r"] for _ in range(5)] == [16, 16, 8, 1, 1]
    assert request.num_output_tokens == 3


def test_rows_stay_within_the_budget_and_the_rest_is_spare() -> None:
    world = World(max_num_batched_tokens=20, prefill_chunk=16)
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
        rows = rows_of(world.step())
        assert rows == {"long": 5, "a": 1, "b": 1, "c": 1}


def test_lower_priority_value_goes_first_then_earlier_arrival() -> None:
    world = World(max_num_seqs=3)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        world.add(name, priority=priority)
    world.step()
    assert ids(world.scheduler.running) == ["d", "b", "a"]
    assert ids(world.scheduler.waiting) == ["c"]


def test_a_better_priority_takes_the_seat_of_the_worst() -> None:
    world = World(max_num_seqs=2)
    world.add("early")
    late = world.add("late")
    world.step()
    world.add("important", priority=-1)
    plan = world.step()
    assert plan.preempted == [late]
    assert ids(world.scheduler.running) == ["important", "early"]
    assert ids(world.scheduler.waiting) == ["late"]
    assert not late.is_running
    assert "late" not in world.blocks.held


def test_equal_priority_takes_nobodys_seat() -> None:
    world = World(max_num_seqs=1)
    world.add("early")
    world.step()
    world.add("late")
    assert world.step().preempted == []
    assert ids(world.scheduler.waiting) == ["late"]


def test_shortage_preempts_the_lowest_ranked_and_recomputes_it_whole() -> None:
    world = World(num_blocks=5, max_num_seqs=2)
    first, second = world.add("first", num_prompt=8), world.add("second", num_prompt=8)
    while not second.num_preemptions:
        world.step()
        assert first.num_preemptions == 0
    assert second.num_computed_tokens == 0
    known = len(second.token_ids)
    assert known > 8
    world.scheduler.remove(first)
    assert rows_of(world.step()) == {"second": known}


def test_a_preempted_request_returns_before_younger_ones() -> None:
    world = World(num_blocks=6, max_num_seqs=2)
    world.add("first", num_prompt=8)
    second = world.add("second", num_prompt=8)
    world.add("third", num_prompt=4)
    while not second.num_preemptions:
        world.step()
    assert ids(world.scheduler.waiting) == ["second", "third"]


def test_admission_waits_until_the_whole_text_fits() -> None:
    world = World(num_blocks=10, prefill_chunk=4)
    world.add("large", num_prompt=32)
    world.step()
    world.add("next", num_prompt=12)
    world.step()
    # Blocks are free, but they are promised to the first prompt.
    assert world.blocks.num_available >= 3
    assert ids(world.scheduler.waiting) == ["next"]


def test_admission_does_not_overtake() -> None:
    world = World(num_blocks=10)
    world.add("large", num_prompt=28)
    world.step()
    world.add("larger", num_prompt=36)
    world.add("tiny", num_prompt=1)
    world.step()
    assert ids(world.scheduler.waiting) == ["larger", "tiny"]


def test_cached_tokens_need_no_rows_but_one_always_runs() -> None:
    world = World()
    world.blocks.cached = 1000
    request = world.add("r", num_prompt=12)
    plan = world.step()
    assert rows_of(plan) == {"r": 4}
    assert request.num_cached_tokens == 8
    assert world.blocks.salts == ["cache_salt of r"]


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_a_removed_request_holds_nothing(state: str) -> None:
    world = World(max_num_seqs=1)
    request = world.add("r")
    if state != "waiting":
        world.step()
    if state == "preempted":
        world.add("important", priority=-1)
        world.step()
        assert request.num_preemptions == 1
    world.scheduler.remove(request)
    assert "r" not in world.blocks.held
    assert request not in list(world.scheduler.requests())


def test_nothing_to_do_is_an_empty_plan() -> None:
    plan = World(max_num_batched_tokens=9).step()
    assert (plan.scheduled, plan.preempted, plan.num_rows, plan.spare_rows) == ([], [], 0, 9)


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
    assert world.blocks.held == {}
    assert world.blocks.num_available == num_blocks
