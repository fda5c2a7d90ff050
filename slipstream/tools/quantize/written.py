"""Layers in 8 and 4 bits as compressed-tensors writes them, as vLLM and transformers read them: in its
formats "int-quantized" and, in 4 bits, "pack-quantized", asymmetric, in groups.

Eight codes lie in an int32, the first in its lowest bits: a weight's along the input, zero points' along
the output. https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from engine.kernels.grouped_weight import GroupedWeight
from engine.model.experts import unrounded_layers
from engine.weights.formats.compressed_tensors import INTS, METHOD, PACKED, SCHEME
from engine.weights.rounding.gptq import BITS, SPAN
from engine.weights.rounding.int8 import quantize_by_channel
from engine.weights.words import unpack

_IN_A_WORD = 32 // BITS
_WEIGHTS = {
    "num_bits": BITS,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": SPAN,
    "dynamic": False,
}


class WrittenLinear(nn.Module):
    """A layer whose tensors have the names of the format. It computes with the weights that they mean,
    unpacked at every call: enough to calibrate what follows, and to compare. ``dtype``: of the scales,
    the model's."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero_point: torch.Tensor

    def __init__(
        self, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert weight.scales is not None
        assert weight.zeros is not None
        self.out_features, self.in_features = weight.codes.shape
        tensors = {
            "weight_packed": _packed(weight.codes),
            "weight_scale": weight.scales.to(dtype),
            "weight_zero_point": _packed(weight.zeros.T).T.contiguous(),
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        for name, values in tensors.items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        zeros = unpack(self.weight_zero_point.T, BITS)[:, : self.out_features].T
        codes = unpack(self.weight_packed, BITS)[:, : self.in_features]
        weight = GroupedWeight(codes, BITS, 0, SPAN, self.weight_scale, zeros).dequantized()
        return F.linear(inputs, weight.to(inputs.dtype), self.bias)


def has_place(module: nn.Module) -> bool:
    """Whether the format has a place for the layer in 4 bits: its groups have to be whole."""
    return type(module) is nn.Linear and module.in_features % SPAN == 0


def store_4_bits(model: PreTrainedModel, groups: Iterable[Mapping[str, GroupedWeight]]) -> int:
    """Gives the layers of each group, as soon as it comes, the form that ``save_pretrained`` writes, and
    the configuration what readers have to know; returns how many these are. All other linear layers keep
    their type."""
    count = 0
    for group in groups:
        for name, weight in group.items():
            module: Any = model.get_submodule(name)
            model.set_submodule(name, WrittenLinear(weight, module.bias, model.dtype))
        count += len(group)
    kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    model.config.quantization_config = written_scheme(kept, PACKED, {"weights": _WEIGHTS})
    return count


@torch.no_grad()
def rounded_to_int8(model: PreTrainedModel) -> Iterator[dict[str, GroupedWeight]]:
    """Yields the model's linear layers in 8 bits by channel, one by one, by name; who takes one may put
    another module in its place. The output head keeps its type, as readers of the format expect, and so
    do gates of states and routers."""
    kept = {model.get_output_embeddings(), *unrounded_layers(model)}
    names = [
        name for name, each in model.named_modules() if type(each) is nn.Linear and each not in kept
    ]
    for name in names:
        linear: Any = model.get_submodule(name)
        yield {name: quantize_by_channel(linear.weight)}


def store_int8(model: PreTrainedModel) -> list[str]:
    """Gives the model's linear layers the form that ``save_pretrained`` writes in 8 bits; returns their
    names."""
    names: list[str] = []
    for group in rounded_to_int8(model):
        for name, weight in group.items():
            assert weight.channel_scales is not None
            stored = nn.Module()
            values = (weight.codes.short() - weight.zero).to(torch.int8)
            stored.weight = nn.Parameter(values, requires_grad=False)
            stored.weight_scale = nn.Parameter(weight.channel_scales[:, None], requires_grad=False)
            stored.bias = model.get_submodule(name).bias
            model.set_submodule(name, stored)
        names += group
    kept = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    model.config.quantization_config = written_scheme(kept)
    return names


def written_scheme(
    ignored: Sequence[str], layout: str = INTS, scheme: Mapping[str, Any] = SCHEME
) -> dict[str, Any]:
    """Returns what a configuration says of a model whose linear layers, but for the ``ignored``, are
    written in the format ``layout`` by one ``scheme``: by default ``store_int8``'s."""
    return {
        "quant_method": METHOD,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        "ignore": list(ignored),
    }


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """``codes`` ``[rows, columns]`` below 16; returns ``[rows, words]`` int32."""
    parts = F.pad(codes, (0, -codes.shape[1] % _IN_A_WORD)).unflatten(1, (-1, _IN_A_WORD))
    words = torch.zeros(parts.shape[:2], dtype=torch.int32)
    for place in range(_IN_A_WORD):
        words |= parts[..., place].int() << BITS * place
    return words
