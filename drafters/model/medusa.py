"""``medusa``: several heads guess several tokens ahead, all from one hidden state.

After Cai et al., Medusa (https://arxiv.org/abs/2401.10774). The hidden state of the row that chose the
anchor goes through the heads; the n-th predicts the n-th token after the anchor, independently of the
others. The tree therefore is a product: the likeliest paths by the heads' probabilities, for this step
and under the request's budget, where the original fixes one shape for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DraftRequest,
    HiddenRows,
    NewRequest,
    Observation,
    RequestState,
    drafter,
)
from drafters.model.growth import INITIAL_ACCEPTANCE, product_tree
from drafters.model.protocol import PredictionHeads
from drafters.tree import EMPTY, DraftTree

NUM_CANDIDATES = 10
"""Per head, as in the original."""


@dataclass(slots=True)
class _LastRow(RequestState):
    """``position``: of the token whose row ``hidden`` is."""

    hidden: Any = None  # [hidden_size]
    position: int = -2  # before the row that precedes any anchor


@drafter
class MedusaDrafter(Drafter):
    """See the module. A hidden state per request; nothing is learned, so nothing crosses tenants."""

    info = DrafterInfo(
        "medusa",
        "Trained heads on the target's last hidden state guess one token each, several ahead. Best "
        "where the text is like what the heads were trained on.",
        needs=DrafterNeeds(hidden_rows=True, draft_model="draft"),
        cost="One small product for all heads and the output head over a row per head.",
        samples=True,
    )
    initial_acceptance = INITIAL_ACCEPTANCE

    def __init__(self, heads: PredictionHeads) -> None:
        super().__init__()
        self._heads = heads

    @classmethod
    def build(cls, context: DrafterContext) -> MedusaDrafter:
        return cls(context.draft_model(cls.info.name))

    def start(self, request: NewRequest) -> _LastRow:  # noqa: ARG002
        return _LastRow()

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Keeps the last row: the one that chose the anchor."""
        for each in rows:
            state = self._states[each.request_id]
            (hidden,) = each.hidden
            state.hidden = hidden[-1]
            state.position = each.first_position + len(hidden) - 1

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Drafts nothing where the anchor's predecessor has not been seen: in a request's first step."""
        return self._heads.read_now(partial(self.begin, requests))

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """See ``Drafter``."""
        trees = [EMPTY] * len(requests)
        ready = [
            index
            for index, each in enumerate(requests)
            if self._states[each.request_id].position == len(each.token_ids) - 2
            and each.max_nodes > 0
        ]
        if not ready:
            return lambda: trees
        found = self._heads.begin(
            [self._states[requests[index].request_id].hidden for index in ready],
            [requests[index] for index in ready],
            NUM_CANDIDATES,
            readback,
        )

        def finish() -> list[DraftTree]:
            for index, levels in zip(ready, found(), strict=True):
                each = requests[index]
                trees[index] = product_tree(levels, each.max_nodes, each.shape)
            return trees

        return finish

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: the heads stay as they are."""
