"""``medusa``: several heads guess several tokens ahead, all from one hidden state.

After Cai et al., Medusa (https://arxiv.org/abs/2401.10774). The hidden state of the row that chose the
anchor goes through heads of which the first predicts the token after the anchor, the second the one
after that, and so on; none of them knows what the others say. The tree therefore is a product: the
likeliest paths by the heads' probabilities, for this step, under the request's budget, where the
original fixes one shape for all. Verification is the engine's, so typical acceptance and its losses
are not part of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drafters.base import (
    DrafterInfo,
    DrafterNeeds,
    DraftRequest,
    HiddenRows,
    Observation,
    OptionValue,
)
from drafters.model.product_tree import product_tree
from drafters.model.protocol import Candidates
from drafters.tree import EMPTY, DraftTree

NUM_CANDIDATES = 10
"""Per head, as in the original."""

INFO = DrafterInfo(
    name="medusa",
    description=(
        "Trained heads on the target's last hidden state guess one token each, several ahead. Best "
        "where the text is like what the heads were trained on."
    ),
    drafts_trees=True,
    needs=DrafterNeeds(hidden_rows=True),
    cost="One small product for all heads and the output head over a row per head.",
    draws=True,
)


class PredictionHeads(Protocol):
    """Heads over a target's hidden states; ``engine.drafting.medusa`` has the real ones."""

    @property
    def num_heads(self) -> int: ...

    def candidates(
        self,
        hidden: Sequence[Any],  # each [hidden_size]
        asks: Sequence[DraftRequest],
        num: int,
    ) -> list[list[Candidates]]:
        """``[request][head]``: ``num`` tokens each, chosen as the request samples; all requests in one
        batch. The tokens of head 0 would stand right after the request's known tokens."""


@dataclass(slots=True)
class _State:
    """``position``: of the token whose row ``hidden`` is."""

    hidden: Any = None  # [hidden_size]
    position: int = -1


class MedusaDrafter:
    """See the module. A hidden state per request; nothing is learned, so nothing crosses tenants."""

    def __init__(self, heads: PredictionHeads) -> None:
        self.info = INFO
        self._heads = heads
        self._states: dict[str, _State] = {}

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],  # noqa: ARG002
        options: Mapping[str, OptionValue],
        cache_salt: str,  # noqa: ARG002
    ) -> None:
        """Raises ValueError for options that do not fit and for a request that is already open."""
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        self.info.resolve(options)
        self._states[request_id] = _State()

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Keep the last row: the one that chose the anchor."""
        for each in rows:
            state = self._states[each.request_id]
            state.hidden = each.hidden[-1]
            state.position = each.first_position + len(each.hidden) - 1

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Empty where the anchor's predecessor has not been seen: in a request's first step."""
        trees = [EMPTY] * len(requests)
        ready = [
            index
            for index, each in enumerate(requests)
            if self._states[each.request_id].position == len(each.token_ids) - 2
            and each.max_nodes > 0
        ]
        if not ready:
            return trees
        found = self._heads.candidates(
            [self._states[requests[index].request_id].hidden for index in ready],
            [requests[index] for index in ready],
            NUM_CANDIDATES,
        )
        for index, levels in zip(ready, found, strict=True):
            each = requests[index]
            trees[index] = product_tree(levels, each.max_nodes, each.shape)
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: the heads stay as they are."""

    def num_top_tokens(self, request_id: str) -> int:  # noqa: ARG002
        return 0

    def close(self, request_id: str) -> None:
        """Forget the request; closing one that is not open does nothing (aborts may race)."""
        self._states.pop(request_id, None)
