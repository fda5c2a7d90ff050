"""Mamba 2's scan."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.states.operator import state_operator
from engine.states.plan import Recurrence, StatePlan


@state_operator(
    "mamba2_chunk_scan",
    never_called=("mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"),
)
def mamba2_scan(
    plan: StatePlan,
    op: int,
    hidden_states: Tensor,  # [1, num_rows, heads, head_dim]
    dt: Tensor,  # [1, num_rows, heads]
    A: Tensor,  # noqa: N803  # [heads]
    B: Tensor,  # noqa: N803  # [1, num_rows, groups, state_size]
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803  # [heads]
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, None]:
    rows, dt = hidden_states[0].float(), dt[0]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    asked = Recurrence(C[0], B[0], rows * dt[..., None], A.float() * dt)
    output = plan.recur(op, asked)
    if D is not None:
        output = output + D[:, None] * rows
    return (output[None], None) if return_final_states else output[None]
