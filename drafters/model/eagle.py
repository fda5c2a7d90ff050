"""``eagle``: a layer that continues the target's hidden states, and drafts from what it expects.

After Li et al., EAGLE (https://arxiv.org/abs/2401.15077) and EAGLE-2
(https://arxiv.org/abs/2406.16858). A drafted token's row reads its embedding and the state expected of
its parent. Rounds, trees and their prices are those of every draft model; besides, rows of known tokens
read the target's own states, and rows of accepted drafts are run again with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafters.base import (
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DraftRequest,
    HiddenRows,
    drafter,
)
from drafters.model.model_drafter import OPTIONS, ModelDrafter
from drafters.model.protocol import DraftRows, FeatureModel


@drafter
class EagleDrafter(ModelDrafter):
    """See the module."""

    info = DrafterInfo(
        "eagle",
        "A trained layer continues the target's hidden states. More often right than medusa, "
        "at one small forward per drafted token.",
        options=OPTIONS,
        needs=DrafterNeeds(hidden_rows=True, draft_slots=True),
        cost="A forward of one layer and the output head per level of the tree; a layer's KV.",
        samples=True,
    )

    def __init__(self, model: FeatureModel) -> None:
        super().__init__(model)
        self._features = model
        self._num_seen: dict[str, int] = {}
        """Tokens whose states were told, up to the newest."""

    @classmethod
    def build(cls, context: DrafterContext) -> EagleDrafter:
        return cls(context.eagle_head())

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        for each in rows:
            self._features.take_hidden(each.request_id, each.first_position, each.hidden)
            self._num_seen[each.request_id] = each.first_position + len(each.hidden)

    def finish(self, request_id: str, state: Any) -> None:  # noqa: ARG002
        self._features.forget(request_id)
        self._num_seen.pop(request_id, None)

    def _has_room(self, ask: DraftRequest) -> bool:
        """Only once the state is known that chose the anchor: not in a request's first step."""
        seen = self._num_seen.get(ask.request_id)
        return seen == len(ask.token_ids) - 1 and super()._has_room(ask)

    def _wrote(self, rows: Sequence[DraftRows]) -> None:
        """Rows of drafts are not remembered as the text's, even if accepted: what they read was only
        expected."""
        for each in rows:
            if each.base < len(each.ask.token_ids):
                root = self._states[each.ask.request_id].text.root
                self._contents.write(each.ask.block_table, root, each.base, each.token_ids)
