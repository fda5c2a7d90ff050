"""Causal convolutions over each channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from engine.states.operator import state_operator
from engine.states.plan import Convolution, StatePlan


@state_operator("causal_conv1d_fn", never_called=("causal_conv1d_update",))
def convolution(
    plan: StatePlan,
    op: int,
    hidden_states: Tensor,  # [1, channels, num_rows]
    weight: Tensor,  # [channels, width]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    silu = activation in ("silu", "swish")
    rows = hidden_states[0].transpose(0, 1)
    output = plan.convolve(op, Convolution(rows, weight, bias, silu)).transpose(0, 1)[None]
    return output if silu or activation is None else ACT2FN[activation](output)
