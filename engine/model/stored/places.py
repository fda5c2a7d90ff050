"""Gives transformers' loader the places that a checkpoint in few bits fills.

transformers reads such formats by packages that turn weights back to floats, or not at all. Here a
quantizer of its own interface puts modules of ours in the place of layers; its loader does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD = "slipstream-stored"

Place = Callable[[str, nn.Module], nn.Module | None]
"""Takes a module's name and the module; returns what stands in its place, or None: it stays."""


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):
    """To be given to ``from_pretrained`` as its ``quantization_config``. ``place``: makes a
    ``StoredWeight`` for each module that the checkpoint holds in few bits. It is called while modules are
    on the device "meta"."""

    def __init__(self, place: Place | None = None, **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.place = place


@register_quantizer(_METHOD)
class StoredQuantizer(HfQuantizer):
    """Puts the places into a model before its weights are loaded."""

    requires_calibration = False
    quantization_config: StoredConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        place = self.quantization_config.place
        assert place is not None, "loaded by this package alone"
        for name, module in list(model.named_modules(remove_duplicate=False)):
            found = place(name, module)
            if found is not None:
                model.set_submodule(name, found)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
