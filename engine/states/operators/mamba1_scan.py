"""Mamba 1's scan: each channel is a head of one value, with a decay for each of its keys."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.states.operator import state_operator
from engine.states.plan import Recurrence, StatePlan


@state_operator(
    "mamba_selective_scan", never_called=("mamba_selective_state_update", "mamba_inner_fn")
)
def mamba1_scan(
    plan: StatePlan,
    op: int,
    hidden_states: Tensor,  # [1, channels, num_rows]
    dt: Tensor,  # [1, channels, num_rows]
    A: Tensor,  # noqa: N803  # [channels, state_size]
    B: Tensor,  # noqa: N803  # [1, state_size, num_rows]
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803  # [channels]
    z: Tensor,  # [1, channels, num_rows]
    delta_bias: Tensor,  # [channels]
    **_: Any,
) -> Tensor:
    rows = hidden_states[0].T.float()
    step = F.softplus(dt[0].T + delta_bias.to(dt.dtype)).float()
    decays = step[..., None] * A.float()
    # One head of queries and keys serves all channels.
    asked = Recurrence(C[0].T[:, None], B[0].T[:, None], (rows * step)[..., None], decays)
    output = plan.recur(op, asked)[..., 0] + rows * D
    return output.T[None] * F.silu(z)
