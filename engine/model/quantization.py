"""Gives a model's linear layers 8 bits in place: to compute in, those that read one input side by side,
or to be written to a folder.

Which layers share an input is seen in a forward, not guessed from names: queries, keys and values in most
models, gate and up projections, all that hang under one parent and read the same tensor.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.int8 import (
    Int8Product,
    Int8Weight,
    is_exact,
    quantize_by_channel,
    quantize_weight,
)
from engine.model.layers import Int8Linear, as_linear, is_plain
from engine.model.stored.compressed_tensors import StoredInt8Linear, written_scheme
from engine.request.errors import UnsupportedModelError
from engine.request.info import QuantizationInfo

logger = logging.getLogger(__name__)


def has_stored_weights(model: nn.Module) -> bool:
    """Whether the checkpoint came in 8 bits."""
    return any(isinstance(module, StoredInt8Linear) for module in model.modules())


@torch.inference_mode(False)
@torch.no_grad()
def quantize_model(model: PreTrainedModel, with_head: bool = True) -> QuantizationInfo:
    """Replaces linear layers by ones of 8 bits, group by group: memory never holds more than the model
    and its largest group twice. ``model`` still runs on transformers' own attention. ``with_head``: the
    output head, too; weights that come in 8 bits stay what they are.

    Raises UnsupportedModelError where the machine does not compute in 8 bits, or nothing is quantised.
    """
    reason = refusal(model.device)
    if reason is not None:
        raise UnsupportedModelError(f"quantization=int8: {reason}")
    head = model.get_output_embeddings()
    kept = None if with_head or isinstance(head, StoredInt8Linear) else head
    num_parameters = _num_parameters(model)
    groups = [each for each in _groups(model) if model.get_submodule(each[0]) is not kept]
    if not groups:
        kind = type(model).__name__
        raise UnsupportedModelError(f"quantization=int8: {kind} has no linear layers to quantise")
    layers: list[Any] = [model.get_submodule(name) for group in groups for name in group]
    num_layers, num_quantized = len(layers), sum(each.weight.numel() for each in layers)
    has_head = head in layers
    del layers, head  # a layer goes when it is replaced
    while groups:
        _replace(model, groups.pop())
    info = QuantizationInfo(
        "int8", 8, num_layers, num_quantized, num_parameters, num_bytes(model), has_head
    )
    logger.info(
        "%d linear layers in 8 bits, %.0f %% of the parameters: %.0f MiB of weights",
        num_layers,
        100 * info.share,
        info.num_bytes / 2**20,
    )
    return info


def refusal(device: torch.device) -> str | None:
    """Returns why models on this device cannot be served in 8 bits; None: they can."""
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    if not is_exact():
        return "this CPU has no VNNI, and nothing else here multiplies in 8 bits"
    return None


def num_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights, as they are held."""
    products = {each.product for each in model.modules() if isinstance(each, Int8Linear)}
    plain = {*model.parameters(), *model.buffers()}
    return sum(int(each.nbytes) for each in plain) + sum(int(each.num_bytes) for each in products)


def _num_parameters(model: nn.Module) -> int:
    """Returns how many weights there are; scales are not counted."""
    named = model.named_parameters()
    return sum(each.numel() for name, each in named if not name.endswith(".weight_scale"))


def _groups(model: PreTrainedModel) -> list[list[str]]:
    """Returns the names of the linear layers, those together that one product may compute: layers of one
    kind under one parent that a forward calls with one tensor."""
    unread = {
        module: name
        for name, module in model.named_modules()
        if is_plain(module) or isinstance(module, StoredInt8Linear)
    }
    groups: defaultdict[object, list[str]] = defaultdict(list)

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        name = unread.pop(module, None)
        if name is not None:
            (tensor,) = inputs
            # One that is written to in between is another input: that changes its version.
            key = name.rpartition(".")[0], type(module), tensor, tensor._version
            groups[key].append(name)

    handles = [module.register_forward_pre_hook(note) for module in unread]
    try:
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    # Those that this forward left out: experts that no token chose.
    return [*groups.values(), *([name] for name in unread.values())]


def _replace(model: PreTrainedModel, group: Sequence[str]) -> None:
    modules: list[Any] = [model.get_submodule(name) for name in group]
    weights = [_weight(module) for module in modules]
    product = Int8Product(weights, [module.bias for module in modules], model.dtype)
    first = 0
    for name, weight in zip(group, weights, strict=True):
        out_features = len(weight.values)
        model.set_submodule(name, Int8Linear(product, first, out_features))
        first += out_features


def _weight(module: nn.Module) -> Int8Weight:
    if isinstance(module, StoredInt8Linear):
        return Int8Weight(module.weight.detach(), module.weight_scale.detach().float().flatten())
    return quantize_weight(as_linear(module).weight)


@torch.no_grad()
def store_int8(model: PreTrainedModel) -> list[str]:
    """Gives the model's linear layers 8 bits in the form that ``save_pretrained`` writes; returns their
    names. The output head keeps its type, as readers of the format expect."""
    head = model.get_output_embeddings()
    plain = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    names = [name for name, module in plain.items() if module is not head]
    for name in names:
        linear = plain.pop(name)
        with torch.device("meta"):
            stored = StoredInt8Linear(linear.in_features, linear.out_features, False, model.dtype)
        values, scales, _ = quantize_by_channel(linear.weight)
        stored.weight = nn.Parameter(values, requires_grad=False)
        stored.weight_scale = nn.Parameter(scales[:, None], requires_grad=False)
        stored.bias = linear.bias
        model.set_submodule(name, stored)
    model.config.quantization_config = written_scheme(list(plain))
    return names
