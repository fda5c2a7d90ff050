"""Gives a model's linear layers 8 bits in place, those that read one input side by side.

Which layers share an input is seen in a forward, not guessed from names: queries, keys and values in
most models, gate and up projections, whatever hangs under one parent and reads the same tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.errors import UnsupportedModelError
from engine.info import QuantizationInfo
from engine.model.int8 import (
    MOST_IN_FEATURES,
    Int8Linear,
    Int8Product,
    Int8Weight,
    SharedProduct,
    StoredInt8Linear,
    is_exact,
    quantize_weight,
)
from engine.model.linear import as_linear

logger = logging.getLogger(__name__)

_METHOD = "int8"


class _Place(NamedTuple):
    """Where a linear layer hangs, and its sizes."""

    parent: nn.Module
    name: str
    module: nn.Module
    in_features: int
    out_features: int


def has_stored_weights(model: nn.Module) -> bool:
    """Whether the checkpoint came in 8 bits."""
    return any(isinstance(module, StoredInt8Linear) for module in model.modules())


@torch.inference_mode()
def quantize_model(model: PreTrainedModel, with_head: bool = True) -> QuantizationInfo:
    """Replace linear layers by ones of 8 bits, group by group: memory never holds more than the model
    and its largest group twice. ``model`` still runs on transformers' own attention. ``with_head``: the
    output head, too; weights that come in 8 bits stay what they are.

    Raises UnsupportedModelError where the machine does not compute in 8 bits, or nothing is quantised.
    """
    check_machine(model.device)
    head = model.get_output_embeddings()
    num_parameters = _num_parameters(model)
    groups = [
        group
        for group in _groups(model)
        if with_head or group[0].module is not head or isinstance(head, StoredInt8Linear)
    ]
    if not groups:
        kind = type(model).__name__
        raise UnsupportedModelError(f"quantization=int8: {kind} has no linear layers to quantise")
    places = [place for group in groups for place in group]
    num_quantized = sum(place.in_features * place.out_features for place in places)
    num_layers, has_head = len(places), any(place.module is head for place in places)
    del places, head  # layers go with their place
    while groups:
        _replace(groups.pop(), model.dtype)
    info = QuantizationInfo(
        _METHOD, 8, num_layers, num_quantized, num_parameters, num_bytes(model), has_head
    )
    logger.info(
        "%d linear layers in 8 bits, %.0f %% of the parameters: %.0f MiB of weights",
        num_layers,
        100 * info.share,
        info.num_bytes / 2**20,
    )
    return info


_INEXACT = "this CPU has no VNNI, and nothing else here multiplies in 8 bits"


def check_machine(device: torch.device) -> None:
    """Raises UnsupportedModelError where models cannot be served in 8 bits."""
    reason = refusal(device)
    if reason is not None:
        raise UnsupportedModelError(f"quantization=int8: {reason}")


def refusal(device: torch.device) -> str | None:
    """Why models on this device cannot be served in 8 bits; None: they can."""
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    return None if is_exact() else _INEXACT


def num_bytes(model: nn.Module) -> int:
    """Of all weights, as they are held."""
    products = {
        id(module.shared.product): module.shared.product
        for module in model.modules()
        if isinstance(module, Int8Linear)
    }
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    plain = sum(each.numel() * each.element_size() for each in tensors.values())
    return plain + sum(each.num_bytes for each in products.values())


def _num_parameters(model: nn.Module) -> int:
    """Weights; not their scales."""
    named = ((name, each) for name, each in model.named_parameters())
    return sum(each.numel() for name, each in named if not name.endswith(".weight_scale"))


def _groups(model: PreTrainedModel) -> list[list[_Place]]:
    """Linear layers that can be quantised, together those of one parent and kind that a forward calls
    with the same tensor."""
    places = list(_places(model))
    seen: dict[tuple[int, int, type], list[_Place]] = {}
    alone = {place.module: place for place in places}
    # An id names a tensor only while it lives; and one that is written to in between is another input.
    read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(place: _Place) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if alone.pop(module, None) is None:
                return
            key = (id(place.parent), id(inputs[0]), type(module))
            _, copy = read.setdefault(id(inputs[0]), (inputs[0], inputs[0].clone()))
            if key in seen and torch.equal(copy, inputs[0]):
                seen[key].append(place)
            else:
                seen[(id(place), *key[1:]) if key in seen else key] = [place]

        return hook

    handles = [place.module.register_forward_pre_hook(note(place)) for place in places]
    try:
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    # Those that this forward left out: experts that no token chose.
    return [*seen.values(), *([place] for place in alone.values())]


def _places(model: nn.Module) -> Iterator[_Place]:
    for parent in model.modules():
        for name, child in parent.named_children():
            sizes = _sizes(child)
            if sizes is not None and sizes[0] <= MOST_IN_FEATURES:
                yield _Place(parent, name, child, *sizes)


def _sizes(module: Any) -> tuple[int, int] | None:
    """Features in and out; None: no linear layer."""
    if type(module) is Conv1D:
        return module.weight.shape[0], module.weight.shape[1]
    if type(module) in (nn.Linear, StoredInt8Linear):
        return module.in_features, module.out_features
    return None


def _replace(group: Sequence[_Place], dtype: torch.dtype) -> None:
    modules: list[Any] = [place.module for place in group]
    product = Int8Product(
        [_weight(module) for module in modules], [module.bias for module in modules], dtype
    )
    shared = SharedProduct(product, len(group))
    first = 0
    for place in group:
        setattr(place.parent, place.name, Int8Linear(shared, first, place.out_features))
        first += place.out_features


def _weight(module: nn.Module) -> Int8Weight:
    if isinstance(module, StoredInt8Linear):
        return module.stored()
    linear = as_linear(module)
    assert linear is not None
    return quantize_weight(linear.weight)
