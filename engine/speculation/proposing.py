"""Asks drafters for their drafts of a step, each for all its requests at once.

Drafters with a model batch, so one call serves every request of a drafter, whether that names it or it
is a guest there. Where such a call fails, its requests are asked again one by one: a request that a
drafter cannot handle costs no other its draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from drafters.base import DraftRequest, DraftShape
from drafters.containment import guarded
from drafters.tree import DraftTree
from engine.schedule.request import Plan, ScheduledRequest
from engine.speculation.drafting import check_trees, drafting_of, is_of_core, timed
from engine.speculation.granting import lease
from engine.speculation.parts import Ask, Asked, Part
from kvpool.block_pool import BlockPool

if TYPE_CHECKING:
    from engine.transfer import Readback


class Proposing:
    """Calls the drafters of an engine."""

    def __init__(self, pool: BlockPool, vocab_size: int) -> None:
        self._pool, self._vocab_size = pool, vocab_size

    def propose(self, asked: Asked, plan: Plan, readback: Readback, rate: float) -> None:
        """Sets ``proposal`` of requests, and the shares of their guests. All drafters begin before what
        they read of the device is fetched, once. ``rate``: the tokens per second that the step would
        write without drafts."""
        begun, waiting = [], []
        for name, group in asked.items():
            drafter, num_before = group[0][1].drafter, readback.num_added
            with timed(plan, name):
                for each, part in group:
                    part.catch_up(each.request.request_id, each.request.token_ids)
                asks = [self._ask(each, part, rate) for each, part in group]
                finish = guarded(_blamed(group), drafter.begin, asks, readback)
            begun.append((name, group, asks, finish))
            if readback.num_added > num_before:
                waiting.append(name)
        if waiting:
            with timed(plan, *waiting):
                guarded([], readback.fetch)
        for name, group, asks, finish in begun:
            with timed(plan, name):
                self._finish(group, asks, finish)

    def _ask(self, each: ScheduledRequest, part: Part, plain_rate: float) -> DraftRequest:
        request, drafting, num_nodes = each.request, drafting_of(each), each.num_asked
        shape, drafter = drafting.shape, part.drafter
        prices, worth = part.prices_in(each), drafting.drafter.row_worth
        if drafter.info.needs.draft_slots:
            room = lease(self._pool, request, max(num_nodes, drafter.num_slots))
            num_nodes = min(num_nodes, room)
        if each.max_depth != shape.depth:
            shape = DraftShape(shape.width, each.max_depth)
        return DraftRequest(
            request.request_id,
            request.token_ids,
            num_nodes,
            shape,
            request.sampling.draft_sampling(),
            request.num_computed_tokens,
            self._pool.block_table(request.request_id),
            plain_rate if drafting.policy.weighs_cost else 0.0,
            [max(0.0, price - worth) for price in prices] if worth else prices,
        )

    def _finish(
        self,
        group: Sequence[Ask],
        asks: Sequence[DraftRequest],
        finish: Callable[[], list[DraftTree]] | None,
    ) -> None:
        """Takes the trees of all requests at once; one by one if that goes wrong."""
        drafter = group[0][1].drafter
        trees: Sequence[DraftTree] | None = None
        if finish is not None:
            check = partial(check_trees, asks=asks, vocab_size=self._vocab_size)
            if is_of_core(drafter):
                trees = guarded(_blamed(group), finish)
            else:
                trees = guarded(_blamed(group), lambda: check(finish()))
        if trees is not None:
            for (each, part), tree in zip(group, trees, strict=True):
                if part is each.request.drafting:
                    each.proposal = tree
                else:
                    each.shares[part] = tree
        elif len(asks) > 1:
            for one, ask in zip(group, asks, strict=True):
                self._finish([one], [ask], partial(drafter.propose, [ask]))


def _blamed(group: Sequence[Ask]) -> list[Part]:
    """Returns whose failure it is if a drafter fails for all of these: nobody's of several, which are
    asked again one by one."""
    return [] if len(group) > 1 else [group[0][1]]
