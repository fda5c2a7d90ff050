"""Gives transformers' loader the placeholders that a quantized checkpoint fills.

transformers reads such formats by packages that turn weights back to floats, or not at all. Here a
quantizer of its own interface replaces layers by our modules; its loader does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.request.errors import UnsupportedModelError
from engine.weights.experts import StoredExperts, place_experts
from engine.weights.files import read_header
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, StoredWeight, type_name

_METHOD = "slipstream-stored"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPERTS = re.compile(r"\.experts\.\d+\.\w+\.(qweight|weight_packed|weight_scale(_inv)?)$")


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):
    """A ``quantization_config`` for ``from_pretrained``. ``place``: makes a ``StoredWeight`` for each
    module that is quantized in the checkpoint, while modules are on the device "meta". ``key_mapping``:
    changes the names of safetensors files."""

    def __init__(
        self, place: Place, key_mapping: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        self.quant_method: Any = _METHOD
        self.place, self.key_mapping = place, key_mapping or {}


@register_quantizer(_METHOD)
class StoredQuantizer(HfQuantizer):
    """Puts the places into a model before its weights are loaded, and lets them look at what came."""

    requires_calibration = False
    quantization_config: StoredConfig

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Iterable[str] | None = None, **_: Any
    ) -> None:
        config = self.quantization_config
        tensors = _index_of(checkpoint_files or (), model, config.key_mapping)
        _put(model, tensors, config.place)
        _refuse_experts(model, tensors)
        _refuse_codes(model, tensors)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, StoredWeight | StoredExperts):
                module.loaded(name)
        # It is a model of ours, whose layers will be replaced.
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _index_of(
    files: Iterable[str], model: PreTrainedModel, key_mapping: Mapping[str, str]
) -> TensorIndex:
    """Reads the headers alone. ``key_mapping``: patterns in names, and what stands there in the model's;
    transformers has more for some models. Raises UnsupportedModelError for damaged files, and files of
    another kind."""
    found = {}
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    for path in map(Path, files):
        if path.suffix != ".safetensors":
            raise UnsupportedModelError(
                f"weights in few bits are read from safetensors files, not from {path.name}"
            )
        for name, tensor in read_header(path).items():
            for pattern, new in key_mapping.items():
                name = re.sub(pattern, new, name, count=1)
            found[apply_renamings(name, renamings)] = tensor
    return TensorIndex(found, model.base_model_prefix)


def _put(model: PreTrainedModel, tensors: TensorIndex, place: Place) -> None:
    """Puts the places into the model. One is tied to another place, or to nothing."""
    placed = set()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        found: nn.Module | None = place_experts(name, module, tensors, place)
        found = place(name, module, tensors) if found is None else found
        if found is not None:
            model.set_submodule(name, found)
            placed.add(f"{name}.weight")
    tied = model.all_tied_weights_keys
    for name in placed & tied.keys():
        if tied[name] not in placed:
            del tied[name]


def _refuse_experts(model: PreTrainedModel, tensors: TensorIndex) -> None:
    """Raises UnsupportedModelError if the model keeps experts in one tensor, which has no placeholder
    for quantized ones."""
    modules = dict(model.named_modules())
    for name in tensors:
        if _EXPERTS.search(name) and name.rpartition(".")[0] not in modules:
            raise UnsupportedModelError(
                f"{name}: experts in few bits are not served, where the model keeps them in one tensor"
            )


def _refuse_codes(model: PreTrainedModel, tensors: TensorIndex) -> None:
    """Raises UnsupportedModelError where a layer that stayed would take codes for values."""
    kinds = StoredWeight | StoredExperts
    stored = {name for name, each in model.named_modules() if isinstance(each, kinds)}
    for name, _ in model.named_parameters():
        found = tensors.get(name)
        if found and found.dtype not in _FLOATS and name.rpartition(".")[0] not in stored:
            raise UnsupportedModelError(
                f"{name} is of {type_name(found.dtype)}, which quantization_config does not explain"
            )
