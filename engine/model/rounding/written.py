"""Layers in 4 bits as compressed-tensors writes them, in its format "pack-quantized": asymmetric, in
groups, as vLLM and transformers read it.

Eight codes lie in an int32, the first in its lowest bits: a weight's along the input, zero points' along
the output. https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from engine.model.grouped import GroupedWeight
from engine.model.rounding.gptq import BITS, SPAN

_IN_A_WORD = 32 // BITS


class WrittenLinear(nn.Module):
    """A layer's tensors under the names of the format; it computes nothing. ``dtype``: of the scales,
    the model's."""

    def __init__(
        self, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert weight.scales is not None
        assert weight.zeros is not None
        tensors = {
            "weight_packed": _packed(weight.codes),
            "weight_scale": weight.scales.to(dtype),
            "weight_zero_point": _packed(weight.zeros.T).T.contiguous(),
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        for name, values in tensors.items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.bias = bias


def can_be_written(module: nn.Module) -> bool:
    """Whether the format has a place for the layer in 4 bits: its groups have to be whole."""
    return type(module) is nn.Linear and module.in_features % SPAN == 0


def store_4_bits(model: PreTrainedModel, weights: Mapping[str, GroupedWeight]) -> None:
    """Gives the layers named the form that ``save_pretrained`` writes, and the configuration what readers
    have to know. All other linear layers keep their type."""
    for name, weight in weights.items():
        module: Any = model.get_submodule(name)
        model.set_submodule(name, WrittenLinear(weight, module.bias, model.dtype))
    kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    model.config.quantization_config = _scheme(kept)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """``codes`` ``[rows, columns]`` below 16; returns ``[rows, words]`` int32."""
    whole = F.pad(codes, (0, -codes.shape[1] % _IN_A_WORD)).int().unflatten(1, (-1, _IN_A_WORD))
    # No two share a bit, so that their sum is what lies in the word.
    words: torch.Tensor = (whole << torch.arange(0, 32, BITS, dtype=torch.int32)).sum(
        2, dtype=torch.int32
    )
    return words


def _scheme(ignored: Sequence[str]) -> dict[str, Any]:
    weights = {
        "num_bits": BITS,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": SPAN,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignored),
    }
