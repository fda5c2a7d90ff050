"""Checkpoints whose linear weights come in 8 bits, in compressed-tensors' format "int-quantized": read as
they are, and described.

transformers reads that format by a package that turns weights back to floats. Here a quantizer of
its own interface puts ``StoredInt8Linear`` where the checkpoint says so, and its loader does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.kernels.grouped_weight import GroupedWeight
from engine.model.stored.layer import StoredLinear
from engine.request.errors import UnsupportedModelError

_METHOD = "slipstream-int8"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_SCHEME = {
    "weights": {**_INT8, "strategy": "channel"},
    "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
}


class StoredInt8Linear(StoredLinear):
    """A layer as a checkpoint in 8 bits brings it, before ``quantize_model`` gives it a product.

    ``weight`` ``[out_features, in_features]`` int8, ``weight_scale`` ``[out_features, 1]``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias, dtype)
        self.weight = _fixed(torch.empty(out_features, in_features, dtype=torch.int8))
        self.weight_scale = _fixed(torch.empty(out_features, 1, dtype=torch.float32))

    scheme, method, bits = "8 bits by channel", "compressed-tensors", 8

    def part(self, first: int, end: int) -> GroupedWeight:
        codes = (self.weight[first:end].short() + 128).to(torch.uint8)
        scales = self.weight_scale[first:end, 0].float()
        return GroupedWeight(codes, 8, 128, self.in_features, None, channel_scales=scales)


def _fixed(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


@register_quantization_config(_METHOD)
class StoredInt8Config(QuantizationConfigMixin):
    """Which layers have 8 bits: ``targets`` less ``ignore``, each a class's name, a module's name or
    "re:" and a pattern of one."""

    def __init__(self, targets: Sequence[str] = (), ignore: Sequence[str] = (), **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.targets = list(targets)
        self.ignore = list(ignore)

    def takes(self, name: str, module: nn.Module) -> bool:
        if type(module) is not nn.Linear or _matches(self.ignore, name, module):
            return False
        return _matches(self.targets, name, module)


def _matches(patterns: Sequence[str], name: str, module: nn.Module) -> bool:
    return any(
        re.match(each.removeprefix("re:"), name) is not None
        if each.startswith("re:")
        else each in (name, type(module).__name__)
        for each in patterns
    )


@register_quantizer(_METHOD)
class StoredInt8Quantizer(HfQuantizer):
    """Gives transformers' loader the places that an 8-bit checkpoint fills."""

    requires_calibration = True
    quantization_config: StoredInt8Config

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for name, module in list(model.named_modules()):
            if not self.quantization_config.takes(name, module):
                continue
            sizes = module.in_features, module.out_features
            with torch.device("meta"):
                stored = StoredInt8Linear(*sizes, module.bias is not None, module.weight.dtype)
            model.set_submodule(name, stored)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def read_scheme(config: Any) -> None:
    """Lets transformers load a checkpoint of 8 bits by this module; others it loads as it does. Changes
    ``config``, a model's.

    Raises UnsupportedModelError for variants of the format that are not computed here.
    """
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, Mapping) or found.get("quant_method") != "compressed-tensors":
        return
    groups = list((found.get("config_groups") or {}).values())
    if found.get("format") != "int-quantized" or not groups:
        return
    for group in groups:
        for part, wanted in _SCHEME.items():
            given = group.get(part) or {}
            wrong = [key for key, value in wanted.items() if given.get(key) != value]
            if wrong:
                said = ", ".join(f"{key}={given.get(key)!r}" for key in wrong)
                raise UnsupportedModelError(
                    f"the checkpoint's {part} have {said}; in 8 bits it is served with weights by "
                    "channel and inputs by token, symmetric"
                )
    targets = [target for group in groups for target in group.get("targets", ())]
    config.quantization_config = StoredInt8Config(targets, found.get("ignore") or ()).to_dict()


def written_scheme(ignored: Sequence[str]) -> dict[str, Any]:
    """Returns what a configuration says of a model whose linear layers, but for the ``ignored``, are
    ``StoredInt8Linear``."""
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **_SCHEME}},
        "ignore": list(ignored),
    }
