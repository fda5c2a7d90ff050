"""Gives a model's linear layers 8 bits in place, those that read one input side by side.

Which layers share an input is seen in a forward, not guessed from names: queries, keys and values in most
models, gate and up projections, all that hang under one parent and read the same tensor.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

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
from engine.request.errors import UnsupportedModelError
from engine.request.info import QuantizationInfo

logger = logging.getLogger(__name__)

_METHOD = "int8"


class _Place(NamedTuple):
    """The place where a linear layer hangs, and its sizes."""

    parent: nn.Module
    name: str
    module: nn.Module
    in_features: int
    out_features: int


class _Reading(NamedTuple):
    """Layers of one kind under one parent that a forward calls with one tensor. ``before``: what the
    tensor held when the first of them read it: one that is written to in between is another input."""

    tensor: torch.Tensor
    before: torch.Tensor
    places: list[_Place]

    def has(self, tensor: torch.Tensor, place: _Place) -> bool:
        """Whether a layer that reads the tensor is one of them."""
        is_kind = type(place.module) is type(self.places[0].module)
        return is_kind and tensor is self.tensor and torch.equal(tensor, self.before)


def has_stored_weights(model: nn.Module) -> bool:
    """Whether the checkpoint came in 8 bits."""
    return any(isinstance(module, StoredInt8Linear) for module in model.modules())


@torch.inference_mode()
def quantize_model(model: PreTrainedModel, with_head: bool = True) -> QuantizationInfo:
    """Replaces linear layers by ones of 8 bits, group by group: memory never holds more than the model
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
    """Returns why models on this device cannot be served in 8 bits; None: they can."""
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    return None if is_exact() else _INEXACT


def num_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights, as they are held."""
    products = {
        id(module.shared.product): module.shared.product
        for module in model.modules()
        if isinstance(module, Int8Linear)
    }
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    plain = sum(each.numel() * each.element_size() for each in tensors.values())
    return plain + sum(each.num_bytes for each in products.values())


def _num_parameters(model: nn.Module) -> int:
    """Returns how many weights there are; scales are not counted."""
    named = ((name, each) for name, each in model.named_parameters())
    return sum(each.numel() for name, each in named if not name.endswith(".weight_scale"))


def _groups(model: PreTrainedModel) -> list[list[_Place]]:
    """Returns the linear layers that can be quantised, those together that one product may compute."""
    readings: dict[nn.Module, list[_Reading]] = defaultdict(list)  # by parent
    unread: dict[nn.Module, _Place] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        place = unread.pop(module, None)
        if place is None:
            return
        (tensor,), mine = inputs, readings[place.parent]
        reading = next((each for each in mine if each.has(tensor, place)), None)
        if reading is None:
            mine.append(_Reading(tensor, tensor.clone(), [place]))
        else:
            reading.places.append(place)

    unread.update((place.module, place) for place in _places(model))
    handles = [module.register_forward_pre_hook(note) for module in unread]
    try:
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    read = [reading.places for mine in readings.values() for reading in mine]
    # Those that this forward left out: experts that no token chose.
    return [*read, *([place] for place in unread.values())]


def _places(model: nn.Module) -> Iterator[_Place]:
    for parent in model.modules():
        for name, child in parent.named_children():
            sizes = _sizes(child)
            if sizes is not None and sizes[0] <= MOST_IN_FEATURES:
                yield _Place(parent, name, child, *sizes)


def _sizes(module: Any) -> tuple[int, int] | None:
    """Returns features in and out; None: no linear layer."""
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
