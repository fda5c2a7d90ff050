"""Operators take the place of functions that carry a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.mamba import modeling_mamba

from engine.model.loader import attach_attention, state_shapes
from engine.model.selfcheck import check_logits, reference_logits
from engine.request.errors import UnsupportedModelError
from engine.states import seam
from engine.states.operator import OPERATORS, Operator, state_operator
from engine.states.plan import Convolution, StatePlan
from kvpool.state_store import ConvolutionShape
from worlds.tiny_models import enlarge, make_runner

NEVER_CALLED = {"causal_conv1d_update", "mamba_selective_state_update", "mamba_inner_fn"}


def scan_of_one_tap(plan: StatePlan, op: int, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    rows = hidden_states[0].T
    return plan.convolve(op, Convolution(rows, rows.new_ones(rows.shape[1], 1))).T[None]


def without_arguments() -> Tensor:
    raise AssertionError("it is called with the function's own arguments")


def of_another_shape(plan: StatePlan, op: int, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return scan_of_one_tap(plan, op, hidden_states)[0, 0]


def led_to(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> hf.PreTrainedModel:
    """A Mamba whose scan will be led to ``operator``."""
    function = "mamba_selective_scan"
    # As it was before another model of this process had its layers led to the engine's; put back.
    own = modeling_mamba.mamba_selective_scan
    own = getattr(own, "__wrapped__", own) if hasattr(own, "serves_states") else own
    monkeypatch.setattr(modeling_mamba, function, own)
    monkeypatch.setitem(OPERATORS, function, operator)
    monkeypatch.setattr(seam, "NEVER_CALLED", NEVER_CALLED)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    return hf.AutoModelForCausalLM.from_config(hf.MambaConfig(**sizes)).eval()


def test_layers_of_a_registered_function_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model = led_to(scan_of_one_tap, monkeypatch)
    attach_attention(model)
    assert state_shapes(model) == (ConvolutionShape(64, 4), ConvolutionShape(64, 1)) * 2


@pytest.mark.parametrize(
    ("operator", "says"),
    [
        (without_arguments, r"operator for mamba_selective_scan fails: TypeError\(.without_arg"),
        (of_another_shape, r"cannot run on the engine's attention: Dimension out of range"),
    ],
)
def test_what_an_operator_does_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, operator: Operator, says: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        attach_attention(led_to(operator, monkeypatch))


def test_logits_that_differ_may_be_an_operators_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = led_to(scan_of_one_tap, monkeypatch)
    with torch.no_grad():
        enlarge(model)
    with pytest.raises(UnsupportedModelError, match="or an operator of its states computes"):
        check_logits(make_runner(model, exact=False), reference_logits(model))


def test_a_second_operator_for_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match="two operators for 'causal_conv1d_fn'"):
        state_operator("causal_conv1d_fn")(scan_of_one_tap)
