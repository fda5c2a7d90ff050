"""The gated delta rule, with one decay per head, or one for each of a key's dimensions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.states.operator import state_operator
from engine.states.plan import Recurrence, StatePlan


@state_operator(
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    never_called=("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
)
def delta_rule(
    plan: StatePlan,
    op: int,
    query: Tensor,  # [1, num_rows, key_heads, key_dim]
    key: Tensor,
    value: Tensor,  # [1, num_rows, heads, value_dim]
    g: Tensor,  # [1, num_rows, heads], or for each of a key's dimensions
    beta: Tensor,  # [1, num_rows, heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    rows = query[0], key[0], value[0], g[0], beta[0]
    scale = query.shape[-1] ** -0.5
    output = plan.recur(op, Recurrence(*rows, use_qk_l2norm_in_kernel, scale))
    return output[None], None
