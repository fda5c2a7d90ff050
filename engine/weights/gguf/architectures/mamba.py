"""Mamba 1, alone and between layers that attend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.weights.gguf.architecture import Architecture
from engine.weights.gguf.configuration import Said, kinds_by_heads


def _mamba(said: Said) -> Mapping[str, Any]:
    inner = said.needed("ssm.inner_size")
    found = {
        "expand": inner // said.needed("embedding_length"),
        "intermediate_size": inner,
        "time_step_rank": said.needed("ssm.time_step_rank"),
    }
    return found | ({"model_type": "falcon_mamba"} if said.value("ssm.dt_b_c_rms") else {})


def _jamba(said: Said) -> Mapping[str, Any]:
    kinds = kinds_by_heads(said, "full_attention", "linear_attention")
    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(said.num_layers)]
    return {
        **_turns("attn_layer", [kind == "full_attention" for kind in kinds]),
        **_turns("expert_layer", [name in said.tensors for name in routers]),
        "mamba_dt_rank": said.needed("ssm.time_step_rank"),
        "mamba_expand": said.needed("ssm.inner_size") // said.needed("embedding_length"),
        "num_experts": said.count("expert_count") or 1,
    }


def _turns(name: str, is_one: Sequence[bool]) -> Mapping[str, int]:
    """Says how often a layer is one of a kind, and which is the first: where there is none, one beyond
    the last."""
    count = len(is_one)
    first, *others = (*(at for at, each in enumerate(is_one) if each), count)
    period = others[0] - first if len(others) > 1 else count + 1
    return {f"{name}_period": period, f"{name}_offset": first}


ARCHITECTURES = {
    "jamba": Architecture("jamba", (), _jamba),
    "mamba": Architecture("mamba", (), _mamba),
}
