"""Models split across ranks, by the plan that transformers has for them.

transformers splits the weights as it reads them and inserts the reductions and gathers of the plan; our
attention gets a rank's own heads. This module requests the split, checks that it is possible, and reads
a split weight as a whole.
"""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from engine.request.errors import UnsupportedModelError

_BY_HEADS = ("q_proj", "k_proj", "qkv_proj", "query_key_value")
"""Layers whose outputs are heads, where they are divided."""


def sharding_options(config: Any, num_ranks: int) -> dict[str, Any]:
    """Returns arguments of ``from_pretrained`` with which each of so many ranks gets its part of a model
    of this configuration. Raises UnsupportedModelError with the reason where it cannot be divided so."""
    if num_ranks == 1:
        return {}
    if find_spec("accelerate") is None:
        raise UnsupportedModelError(
            "tensor_parallel_size: transformers needs accelerate to place the parts of a model: "
            "pip install -e '.[tensor-parallel]'"
        )
    kind = getattr(config, "model_type", type(config).__name__)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModelError(
            f"tensor_parallel_size: transformers has no plan to divide {kind} among ranks"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            "tensor_parallel_size: the checkpoint's weights are quantised, and are not divided here"
        )
    if any(name.endswith(_BY_HEADS) and style == "colwise" for name, style in plan.items()):
        _check_heads(config, num_ranks)
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=num_ranks)}


def _check_heads(config: Any, num_ranks: int) -> None:
    for what in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, what, None)
        if count is not None and count % num_ranks:
            raise UnsupportedModelError(
                f"tensor_parallel_size: {count} heads ({what}) cannot be divided among {num_ranks} ranks"
            )


def _is_divided(tensor: torch.Tensor | None) -> bool:
    """Their class takes a second to load; where that has not happened, there is no such tensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of it that this rank holds."""
    divided: Any = tensor
    return divided.to_local() if _is_divided(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of it. Where it is divided, every rank has to ask."""
    divided: Any = tensor
    return divided.full_tensor() if _is_divided(tensor) else tensor


@torch.no_grad()
def whole_layer(layer: nn.Module) -> nn.Module:
    """Returns a layer that computes in this rank alone what ``layer``, an embedding or a linear one,
    computes in all of them; every rank has to ask. The layer itself where it is not divided."""
    if not any(map(_is_divided, layer.parameters())):
        return layer
    made = copy.copy(layer)
    made._parameters = {
        name: None if each is None else nn.Parameter(whole(each).detach(), requires_grad=False)
        for name, each in layer._parameters.items()
    }
    # transformers' forward of a divided layer is the instance's own.
    vars(made).pop("forward", None)
    return made
