"""Medusa's heads as the drafter asks them: what may follow an anchor, head by head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafters.base import DraftRequest
from drafters.model.protocol import Candidates
from engine.drafting.draft_model import ScoredRow, begin_candidates
from engine.drafting.published.medusa import MedusaNetwork
from engine.transfer import Readback, read_now


class MedusaHeads:
    """``drafters.model.protocol.PredictionHeads`` over tensors. The network is bound."""

    read_now = staticmethod(read_now)

    def __init__(self, network: MedusaNetwork) -> None:
        self._network = network

    @torch.inference_mode()
    def begin(
        self,
        hidden: Sequence[torch.Tensor],
        asks: Sequence[DraftRequest],
        num: int,
        readback: Readback,
    ) -> Callable[[], list[list[Candidates]]]:
        """See the protocol. The device is not waited for."""
        logits = self._network.logits(self._network(torch.stack(list(hidden))))
        scored = [
            ScoredRow(ask.sampling, len(ask.token_ids) + head, num)
            for head in range(self._network.num_heads)
            for ask in asks
        ]
        choice = begin_candidates(logits.flatten(0, 1), scored, self._network.vocab_size, readback)

        def finish() -> list[list[Candidates]]:
            found = choice.finish()
            return [found[row :: len(asks)] for row in range(len(asks))]

        return finish
