"""Medusa's heads: residual blocks on the target's hidden state, then the target's own output head.

The original gives every head a vocabulary projection of its own and initialises it with the target's.
Here the projection stays the target's, so that a head costs ``hidden_size`` squared and not
``hidden_size * vocab_size`` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from drafters.base import DraftRequest
from drafters.model.protocol import Candidates
from engine.drafting.draft_model import ScoredRow, begin_candidates
from engine.drafting.heads import DraftHeads, OutputHead
from engine.model.runner import ModelRunner
from engine.transfer import Readback, read_now

KIND = "medusa"
_Result = TypeVar("_Result")


class ResidualHeads(nn.Module):
    """``num_heads`` stacks of ``num_layers`` blocks ``x + SiLU(W x + b)``, all heads in one product."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_layers = num_heads, num_layers
        # Zeros: an untrained head says what the target itself says, as in the original.
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, 1, hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, hidden_size]`` to ``[num_heads, num_rows, hidden_size]``."""
        states = hidden.expand(self.num_heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + F.silu(torch.baddbmm(bias, states, weight))
        return states


class MedusaHeads:
    """``drafters.model.protocol.PredictionHeads`` over tensors."""

    def __init__(self, heads: ResidualHeads, output_head: OutputHead, vocab_size: int) -> None:
        self._heads = heads
        self._output_head = output_head
        self._vocab_size = vocab_size

    def read_now(self, begin: Callable[[Readback], Callable[[], _Result]]) -> _Result:
        return read_now(begin)

    @torch.inference_mode()
    def begin(
        self,
        hidden: Sequence[torch.Tensor],
        asks: Sequence[DraftRequest],
        num: int,
        readback: Readback,
    ) -> Callable[[], list[list[Candidates]]]:
        """See the protocol. The device is not waited for."""
        states = self._heads(torch.stack(list(hidden)))  # [num_heads, num_rows, hidden_size]
        scored = [
            ScoredRow(ask.sampling, len(ask.token_ids) + head, num)
            for head in range(self._heads.num_heads)
            for ask in asks
        ]
        logits = self._output_head(states.flatten(0, 1))
        choice = begin_candidates(logits, scored, self._vocab_size, readback)

        def finish() -> list[list[Candidates]]:
            found = choice.finish()
            return [found[row :: len(asks)] for row in range(len(asks))]

        return finish


def load_medusa(prepared: DraftHeads, runner: ModelRunner) -> MedusaHeads:
    """Returns the heads prepared for the runner's model. Raises DrafterUnavailableError with the reason
    where there are none, and HeadsRefusedError if the tensors do not fit the folder's sizes."""
    folder = prepared.folder(KIND)
    num_heads, num_layers = folder.sizes("num_heads", "num_layers")
    heads = ResidualHeads(num_heads, num_layers, folder.facts.hidden_size)
    folder.load_into(heads)
    heads.to(device=prepared.device, dtype=prepared.dtype).requires_grad_(False)
    return MedusaHeads(heads, prepared.ends_of(runner)[1], folder.facts.vocab_size)


def medusa_config(heads: ResidualHeads) -> dict[str, Any]:
    """Returns what ``load_medusa`` has to know besides the target's facts."""
    return {"kind": KIND, "num_heads": heads.num_heads, "num_layers": heads.num_layers}
