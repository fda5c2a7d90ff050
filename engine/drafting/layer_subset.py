"""Some of a model's layers as a model of its own, over the same modules: nothing is copied.

Early exit (LayerSkip, arXiv 2404.16710: the first layers, then final norm and head) and skipped middle
layers (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916). Layers keep their numbers, so each
writes where the whole model's layer does.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from engine.model.decoder import decoder_layers
from engine.request.errors import UnsupportedModelError

_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
_ATTENDING = "attn_layer_indices"


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Returns the layers that a setting names: "3" the first three, "0,1,4,5" these. Raises ValueError
    naming the setting."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"prefix_layers: {text!r} is neither a number of layers nor a list like 0,1,4,5"
        ) from None
    layers = list(range(numbers[0])) if len(numbers) == 1 else numbers
    if not layers or layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"prefix_layers: {text!r} does not name layers of the target in ascending order; "
            f"it has {num_layers}, numbered from 0"
        )
    if len(layers) == num_layers:
        raise ValueError("prefix_layers: all layers are the target itself; leave some out")
    return layers


def layer_subset(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Returns a model of these layers with the whole one's embedding, final norm and head.

    Raises UnsupportedModelError where the layers cannot be told from the model's other parts.
    """
    base, whole = model.base_model, decoder_layers(model)
    num_layers = len(whole)
    place = next((name for name, child in base.named_children() if child is whole), None)
    if place is None or base is model:
        raise UnsupportedModelError(
            f"prefix_layers: the layers of {type(model).__name__} cannot be told from its other parts"
        )
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    for name in _PER_LAYER:
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) == num_layers:
            setattr(config, name, [kinds[layer] for layer in layers])
    if attending := getattr(config, _ATTENDING, None):
        setattr(config, _ATTENDING, [at for at, each in enumerate(layers) if each in attending])
    chosen = _twin(base, config)
    setattr(chosen, place, nn.ModuleList(whole[layer] for layer in layers))
    twin: PreTrainedModel = _twin(model, config)
    setattr(twin, model.base_model_prefix, chosen)
    return twin


def _twin(module: Any, config: Any) -> Any:
    """Returns the same children under a new parent, which may exchange them and hook itself."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[name] = OrderedDict()
    twin.__dict__.pop("forward", None)  # it would run the other's children
    twin.config = config
    return twin
