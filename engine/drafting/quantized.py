"""Copies of a model with quantised linear weights; everything else is shared with it.

On CPUs with the instructions, ``int8`` is what ``--quantization int8`` makes of a target; the rest is
torchao's.
"""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from drafters.base import DrafterUnavailableError
from engine.config import Quantization
from engine.model.quantization import quantize_model, refusal

logger = logging.getLogger(__name__)

_GROUP_SIZE = 32


def quantized_copy(model: PreTrainedModel, kind: Quantization) -> PreTrainedModel:
    """Returns a copy of ``model``, still on transformers' own attention. Only the weights of linear
    layers take new memory; the log says how much.

    Raises ValueError where the machine lacks what ``kind`` needs, DrafterUnavailableError without
    torchao.
    """
    device = model.device
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    if kind == "int8" and refusal(device) is None:
        twin = copy.deepcopy(model, shared)
        quantize_model(twin)
        return twin
    if kind == "fp8" and device.type != "cuda":
        raise ValueError("quantized: fp8 needs a CUDA device")
    try:
        from torchao import quantization
    except ImportError as error:
        raise DrafterUnavailableError(
            "quantized: torchao is not installed (pip install 'slipstream-llm[quantized]')"
        ) from error
    twin = copy.deepcopy(model, shared)
    quantization.quantize_(twin, _torchao_config(quantization, kind, device))
    num_bytes = _new_bytes(twin, model)
    logger.info("%s copy of the model: %.1f MiB more memory", kind, num_bytes / 2**20)
    return twin


def _torchao_config(quantization: Any, kind: Quantization, device: torch.device) -> Any:
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig()
    if kind == "fp8":
        return quantization.Float8WeightOnlyConfig()
    if device.type == "cuda":
        return quantization.Int4WeightOnlyConfig(
            group_size=_GROUP_SIZE, int4_packing_format="tile_packed_to_4d"
        )
    dtypes: Any = torch
    # torchao has no packed 4-bit product for CPUs: these are unpacked at every call.
    return quantization.IntxWeightOnlyConfig(
        weight_dtype=dtypes.int4, granularity=quantization.PerGroup(_GROUP_SIZE)
    )


def _new_bytes(twin: PreTrainedModel, model: PreTrainedModel) -> int:
    known = {id(parameter) for parameter in model.parameters()}
    return sum(_num_bytes(each) for each in twin.parameters() if id(each) not in known)


def _num_bytes(tensor: Any) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return int(tensor.numel() * tensor.element_size())
    return sum(_num_bytes(getattr(tensor, name)) for name in flatten()[0])
