"""Operators take the place of functions that carry a state."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf
from torch import Tensor
from transformers.models.mamba import modeling_mamba

from engine.model.loader import attach_attention, state_shapes
from engine.states import seam
from engine.states.operator import OPERATORS, state_operator
from engine.states.plan import Convolution, StatePlan
from kvpool.state_store import ConvolutionShape

NEVER_CALLED = {"causal_conv1d_update", "mamba_selective_state_update", "mamba_inner_fn"}


def scan_of_one_tap(plan: StatePlan, op: int, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    rows = hidden_states[0].T
    return plan.convolve(op, Convolution(rows, rows.new_ones(rows.shape[1], 1))).T[None]


def test_layers_of_a_registered_function_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    function = "mamba_selective_scan"
    # As it was before another model of this process had its layers led to the engine's; put back.
    own = modeling_mamba.mamba_selective_scan
    own = getattr(own, "__wrapped__", own) if hasattr(own, "serves_states") else own
    monkeypatch.setattr(modeling_mamba, function, own)
    monkeypatch.setitem(OPERATORS, function, scan_of_one_tap)
    monkeypatch.setattr(seam, "NEVER_CALLED", NEVER_CALLED)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    model = hf.AutoModelForCausalLM.from_config(hf.MambaConfig(**sizes)).eval()
    attach_attention(model)
    assert state_shapes(model) == (ConvolutionShape(64, 4), ConvolutionShape(64, 1)) * 2


def test_a_second_operator_for_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match="two operators for 'causal_conv1d_fn'"):
        state_operator("causal_conv1d_fn")(scan_of_one_tap)
