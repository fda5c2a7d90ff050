"""Checkpoints whose linear weights come in 8 bits, in compressed-tensors' format "int-quantized": read as
they are, and written.

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

from engine.model.int8 import MOST_IN_FEATURES, StoredInt8Linear, quantize_by_channel
from engine.request.errors import UnsupportedModelError

_METHOD = "slipstream-int8"
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


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
            parent_name, _, own_name = name.rpartition(".")
            with torch.device("meta"):
                stored = StoredInt8Linear(
                    module.in_features,
                    module.out_features,
                    module.bias is not None,
                    module.weight.dtype,
                )
            setattr(model.get_submodule(parent_name), own_name, stored)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def read_scheme(config: Any) -> None:
    """Let transformers load a checkpoint of 8 bits by this module; others it loads as it does. Changes
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
        for part, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
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


@torch.no_grad()
def store_int8(model: PreTrainedModel) -> list[str]:
    """Give the model's linear layers 8 bits in the form that ``save_pretrained`` writes; their names. The
    output head keeps its type, as readers of the format expect."""
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and module.in_features <= MOST_IN_FEATURES
    ]
    for name in names:
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear: Any = model.get_submodule(name)
        with torch.device("meta"):
            stored = StoredInt8Linear(linear.in_features, linear.out_features, False, model.dtype)
        values, scales, _ = quantize_by_channel(linear.weight)
        stored.weight = nn.Parameter(values, requires_grad=False)
        stored.weight_scale = nn.Parameter(scales[:, None], requires_grad=False)
        stored.bias = linear.bias
        setattr(parent, own_name, stored)
    rest = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    group = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _INPUTS}
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": rest,
    }
    return names
