"""Speculation with drafters of a test's own, over requests whose targets say what the test says."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Drafter, DraftRequest
from drafters.tree import DraftTree, chain
from engine.config import ShedSpeculation
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.state import SamplingState
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.cost import CostModel
from engine.speculation.manager import Speculation
from engine.transfer import Readback
from kvpool.block_pool import BlockPool
from worlds.engine_harness import DictatedCost
from worlds.fake_drafters import FakeDrafter, Propose

VOCAB = 20
FIXED = SpeculativeParams(draft_strategy="fake", adaptive_depth="fixed", num_speculative_tokens=4)


def zeros(ask: DraftRequest) -> DraftTree:
    return chain([0] * min(ask.max_nodes, ask.shape.depth))


class TimedCost(DictatedCost):
    """Remembers what it was told of drafting."""

    def __init__(self, row_seconds: float = 0.01) -> None:
        super().__init__(row_seconds)
        self.draft_calls: list[tuple[str, int, float]] = []

    def observe_draft(self, drafter: str, num_asked: int, seconds: float) -> None:
        self.draft_calls.append((drafter, num_asked, seconds))


class World:
    plan: Plan

    def __init__(
        self,
        *drafters: Drafter,
        cost: CostModel | None = None,
        max_num_nodes: int = 64,
        shed: ShedSpeculation = "never",
        vocab_size: int = VOCAB,
        num_blocks: int = 8,
    ) -> None:
        self.cost = cost or TimedCost()
        self.pool = BlockPool(num_blocks=num_blocks, block_size=4)
        by_name = {drafter.info.name: drafter for drafter in drafters}
        self.speculation = Speculation(
            by_name, self.cost, vocab_size, max_num_nodes, self.pool, shed, shed_queue=3
        )

    def open(
        self,
        request_id: str,
        speculative: SpeculativeParams = FIXED,
        max_tokens: int = 50,
        salt: str = "",
        prediction: Sequence[int] = (),
    ) -> Request:
        """A request whose prompt is committed but for the anchor."""
        params = GenerationRequest(
            request_id,
            (1, 2, 3),
            SamplingParams(max_tokens=max_tokens),
            speculative,
            cache_salt=salt,
            prediction_token_ids=tuple(prediction),
        )
        state = SamplingState(params, (), VOCAB, 100_000)
        request = Request(params, state)
        self.pool.open(request_id, request.token_ids, "", 0)
        self.pool.allocate(request_id, len(request.token_ids))
        request.start(0)
        request.commit(2, [])
        self.speculation.open(request)
        return request

    def draft(
        self, *requests: Request, spare_rows: int = 100, num_waiting: int = 0
    ) -> list[ScheduledRequest]:
        """The requests' parts in a step of one row each."""
        scheduled = [ScheduledRequest(request, 1) for request in requests]
        self.plan = Plan(
            scheduled, num_rows=len(scheduled), spare_rows=spare_rows, num_waiting=num_waiting
        )
        self.speculation.draft(self.plan, Readback())
        return scheduled

    def observe(self, *scheduled: ScheduledRequest, num_accepted: int = 0) -> None:
        """The draft of each was verified."""
        for each in scheduled:
            row_token_ids = (0,) * (len(each.draft) + 1)
            each.outcome = Outcome(row_token_ids, (0,), (0,), num_accepted)
        self.speculation.observe(self.plan, scheduled)


def fake(name: str = "fake", propose: Propose = zeros, num_top: int = 0) -> FakeDrafter:
    return FakeDrafter(name, propose, num_top=num_top)
