"""Undoes what llama.cpp's conversion does to tensors on their way into a GGUF file.

Only facts that hold for several architectures have names here; ``architectures`` assigns them.
Source: conversion/*.py of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Undo(NamedTuple):
    """How parameters whose names match ``pattern`` are restored. ``rows`` gives for each row of a
    parameter its row in the source tensors, ``columns`` the same for columns (both receive the
    configuration and the number of them), and ``values`` maps values to values. ``join`` assembles the
    parameter, if stacking the tensors is not enough. ``num_parts``: the required number of tensors; 0:
    any."""

    pattern: str
    rows: Callable[[Any, int], Array] | None = None
    columns: Callable[[Any, int], Array] | None = None
    values: Callable[[Array], Array] | None = None
    join: Callable[[Any, Sequence[Array]], Array] | None = None
    num_parts: int = 0

    def is_for(self, name: str, num_parts: int) -> bool:
        """Whether it was done to a parameter that is made of so many tensors."""
        return self.num_parts in (0, num_parts) and re.search(self.pattern, name) is not None


def _halves(num_heads: int, num_rows: int) -> Array:
    """The two halves of each head's rotary dimensions, which lie in turn in the file."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


PERMUTED = (
    Undo(r"q_proj\.\w+$", rows=lambda config, count: _halves(config.num_attention_heads, count)),
    Undo(r"k_proj\.\w+$", rows=lambda config, count: _halves(config.num_key_value_heads, count)),
)
"""Queries and keys in the order of rotary embeddings that turn neighbours."""


def _neighbours(config: Any, count: int) -> Array:
    """Returns the places of rows whose neighbours turn together. In the file the first of every two of a
    head's dimensions that turn lie before the second ones, if positions have sections."""
    rows = np.arange(count).reshape(-1, config.head_dim)
    if "mrope_section" in config.rope_parameters:
        turning = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        halves = rows[:, :turning].reshape(len(rows), 2, -1)
        rows[:, :turning] = halves.swapaxes(1, 2).reshape(len(rows), turning)
    return rows.reshape(-1)


NEIGHBOURS = Undo(r"[qk]_proj\.\w+$", rows=_neighbours)


def less_one(pattern: str) -> Undo:
    """Norms whose class adds one to the weight, which the file has with the one."""
    return Undo(pattern, values=lambda weight: weight - 1)


DECAY = Undo(r"A_log$", values=lambda values: np.log(-values))
"""For every layer with a state the file has -exp(A_log)."""


def _grouped(config: Any, first: int, count: int) -> Array:
    """Rows from ``first`` on are those of value heads, which the file has in turns of key heads, and the
    model by key heads."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = np.arange(first, count).reshape(num_values // num_keys, num_keys, -1)
    return np.concatenate([np.arange(first), heads.swapaxes(0, 1).reshape(-1)])


def _value_heads(config: Any, count: int) -> Array:
    return _grouped(config, 0, count)


def _after_keys(config: Any, count: int) -> Array:
    return _grouped(config, 2 * config.linear_num_key_heads * config.linear_key_head_dim, count)


TILED_VALUES = (
    Undo(r"linear_attn\.(in_proj_qkv|conv1d)\.weight$", rows=_after_keys),
    Undo(r"linear_attn\.(in_proj_[zab]\.weight|dt_bias|A_log)$", rows=_value_heads),
    Undo(r"linear_attn\.out_proj\.weight$", columns=_value_heads),
)


def _by_key_heads(config: Any, count: int) -> Array:
    """Queries, keys, values and gates, each of all heads in the file, of one key head after the other in
    the model."""
    num_heads, key_width = config.linear_num_key_heads, config.linear_key_head_dim
    keys = num_heads * key_width
    values = (count - 2 * keys) // 2
    ends = np.cumsum([0, keys, keys, values, values])
    parts = [
        np.arange(first, end).reshape(num_heads, -1)
        for first, end in zip(ends[:-1], ends[1:], strict=True)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)


MIXED_HEADS = Undo(r"linear_attn\.in_proj_qkvz\.weight$", rows=_by_key_heads, num_parts=2)
"""Older files have one tensor for both, as the model has it."""


def _by_groups(config: Any, count: int) -> Array:
    """All queries, keys and values in the file, of one group of heads after the other in the model."""
    num_heads = config.num_attention_heads
    num_groups = getattr(config, "num_kv_heads", None) or num_heads
    if not getattr(config, "new_decoder_architecture", True):
        num_groups = 1 if config.multi_query else num_heads
    width = count // (num_heads + 2 * num_groups)
    ends = np.cumsum([0, num_heads * width, num_groups * width, num_groups * width])
    parts = [
        np.arange(first, end).reshape(num_groups, -1)
        for first, end in zip(ends[:-1], ends[1:], strict=True)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)


GROUPED_QKV = Undo(r"query_key_value\.\w+$", rows=_by_groups)
TRANSPOSED = Undo(r"(c_attn|c_proj|c_fc)\.weight$", values=np.transpose)


def _latent_rows(config: Any, parts: Sequence[Array]) -> Array:
    """Keys and values of each head from what is stored, the keys' matrices turned about in newer
    files."""
    if len(parts) == 1:
        return parts[0]
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, config.kv_lora_rank)


LATENT = Undo(r"kv_b_proj\.weight$", join=_latent_rows)


def _in_turn(config: Any, parts: Sequence[Array]) -> Array:
    """Gates and what they gate in turn, and experts' matrices turned about."""
    del config
    gates, ups = parts
    both = np.stack([gates, ups], axis=2)
    both = both.reshape(len(gates), -1, *gates.shape[2:])
    return both.swapaxes(1, 2) if both.ndim == 3 else both


_TURNED = Undo(r"experts\.down_proj$", join=lambda _, parts: parts[0].swapaxes(1, 2))
GATES_IN_TURN = (Undo(r"experts\.gate_up_proj(_bias)?$", join=_in_turn), _TURNED)
TURNED = (
    Undo(
        r"experts\.gate_up_proj$",
        join=lambda _, parts: np.concatenate(parts, axis=1).swapaxes(1, 2),
    ),
    _TURNED,
)
"""Experts' matrices turned about."""

SOURCES = (
    (r"experts\.gate_up_proj$", "ffn_gate_exps.weight ffn_up_exps.weight"),
    (r"experts\.gate_up_proj_bias$", "ffn_gate_exps.bias ffn_up_exps.bias"),
    (r"experts\.gate_up_proj$", "ffn_gate_up_exps.weight"),
    (r"experts\.up_proj$", "ffn_up_exps.weight"),
    (r"experts\.down_proj$", "ffn_down_exps.weight"),
    (r"experts\.down_proj_bias$", "ffn_down_exps.bias"),
    (r"\.router\.weight$", "ffn_gate_inp.weight"),
    (r"\.router\.bias$", "ffn_gate_inp.bias"),
    (r"e_score_correction_bias$|expert_bias$", "exp_probs_b.bias"),
    (r"shared_mlp\.input_linear\.weight$", "ffn_gate_shexp.weight ffn_up_shexp.weight"),
    (r"shared_mlp\.input_linear\.weight$", "ffn_gate.weight ffn_up.weight"),
    (r"shared_mlp\.output_linear\.weight$", "ffn_down.weight"),
    (r"mlp\.gate_up_proj\.weight$", "ffn_gate.weight ffn_up.weight"),
    (r"qkv_proj\.weight$", "attn_q.weight attn_k.weight attn_v.weight"),
    (r"in_proj_qkvz\.weight$", "attn_qkv.weight attn_gate.weight"),
    (r"kv_b_proj\.weight$", "attn_k_b.weight attn_v_b.weight"),
    (r"altup_projections\.(?P<at>\d+)\.weight$", "altup_proj.weight"),
    (r"altup_unembed_projections\.(?P<at>\d+)\.weight$", "altup_unembd_proj.weight"),
    (r"router\.scale$", "ffn_gate_inp.scale"),
    (r"router\.per_expert_scale$", "ffn_down_exps.scale"),
    (r"dt_bias$", "ssm_dt.bias"),
    (r"A_log$", "ssm_a"),
    (
        r"self_attn\.conv1d\.weight$",
        "ssm_conv1d_q.weight ssm_conv1d_k.weight ssm_conv1d_v.weight",
    ),
    (r"forget_gate\.f_a_proj\.weight$", "ssm_f_a.weight"),
    (r"forget_gate\.f_b_proj\.weight$", "ssm_f_b.weight"),
)
"""Patterns of parameters that ``gguf``'s table does not name, or in another way than files have them,
and the layer's tensors that they are made of."""
