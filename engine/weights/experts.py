"""A layer's quantized experts in a checkpoint: placeholders for their tensors, which replace the
model's own experts module, and the meaning of these tensors.

Like other placeholders they last from loading to packing (``engine.model.experts``), and compute
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.blocks import BLOCK_TYPES, block_scales
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, StoredLinear, fixed


class ExpertWeights(NamedTuple):
    """One product of all experts. ``parts``: yields an expert's weights, some output channels at a
    time; ``bias``: ``[num_experts, out_features]``, or None; ``scheme``: as shown to users. ``packs``:
    if false, ``floats`` returns an expert's weights, given its index and a type."""

    out_features: int
    in_features: int
    parts: Callable[[int], Iterator[GroupedWeight]]
    bias: torch.Tensor | None
    scheme: str
    packs: bool = True
    floats: Callable[[int, torch.dtype], torch.Tensor] | None = None

    def dequantized(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``[out_features, in_features]``."""
        if self.floats is not None:
            return self.floats(expert, dtype)
        return torch.cat([part.dequantized().to(dtype) for part in self.parts(expert)])


def expert_sizes(own: Any) -> dict[str, tuple[int, int]]:
    """Returns output and input features of each product of transformers' module of experts, by names of
    parameters: ``gate_up_proj`` or ``up_proj``, and ``down_proj``; nothing for other modules."""
    first = "gate_up_proj" if getattr(own, "has_gate", False) else "up_proj"
    shapes = [getattr(getattr(own, name, None), "shape", ()) for name in (first, "down_proj")]
    named = {name.removesuffix("_bias") for name, _ in own.named_parameters(recurse=False)}
    if getattr(own, "is_transposed", None) is None or named != {first, "down_proj"}:
        return {}
    if any(len(shape) != 3 for shape in shapes):
        return {}
    both = [tuple(shape[:0:-1] if own.is_transposed else shape[1:]) for shape in shapes]
    return dict(zip((first, "down_proj"), both, strict=True))


class StoredExperts(nn.Module):
    """``own``: the model's module, which keeps no weights and is none of this one's modules.
    ``method``: the format that weights came in."""

    method: str

    def __init__(self, own: Any) -> None:
        """Raises UnsupportedModelError for experts of a form that is not served quantized."""
        super().__init__()
        self.sizes = expert_sizes(own)
        if not self.sizes:
            raise UnsupportedModelError(
                f"{type(own).__name__}: experts of this form are not served in few bits"
            )
        self.num_experts: int = own.num_experts
        own._parameters.clear()
        vars(self)["own"] = own

    def loaded(self, name: str) -> None:
        """Is called once, as a ``StoredWeight``'s."""

    def weights(self) -> dict[str, ExpertWeights]:
        """Returns products by their names: ``gate_up_proj``, ``gate_proj`` and ``up_proj``, or
        ``up_proj`` alone; and ``down_proj``. The channels of a ``gate_up_proj`` are the gate's, then the
        others."""
        raise NotImplementedError


def _halves(sizes: Mapping[str, tuple[int, int]], name: str) -> tuple[int, int]:
    """Returns the sizes of a product, which may be half of one."""
    if name in sizes:
        return sizes[name]
    channels, features = sizes["gate_up_proj"]
    return channels // 2, features


class GgufExperts(StoredExperts):
    """Experts as GGUF files have them. ``kinds``: types, each one of ``BLOCK_TYPES``, by the parameters
    that are there: ``gate_up_proj``, or ``gate_proj`` and ``up_proj`` apart, or ``up_proj`` alone where
    there is no gate; and ``down_proj``. They are ``[num_experts, out_features, bytes of a row]`` uint8.
    Where the model's experts have biases, each has one beside it, ``<name>_bias``, ``[num_experts,
    out_features]`` of ``dtype``."""

    method = "gguf"

    def __init__(self, own: Any, kinds: Mapping[str, str], dtype: torch.dtype) -> None:
        super().__init__(own)
        self.kinds = dict(kinds)
        for name, kind in kinds.items():
            channels, features = _halves(self.sizes, name)
            row_bytes = BLOCK_TYPES[kind].row_bytes(features)
            blocks = torch.empty(self.num_experts, channels, row_bytes, dtype=torch.uint8)
            self.register_parameter(name, fixed(blocks))
            if own.has_bias:
                bias = fixed(torch.empty(self.num_experts, channels, dtype=dtype))
                self.register_parameter(f"{name}_bias", bias)

    def weights(self) -> dict[str, ExpertWeights]:
        return {name: self._product(name) for name in self.kinds}

    def block_scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields numbers that are finite where weights are, by parameters."""
        for name, kind in self.kinds.items():
            yield name, block_scales(getattr(self, name).detach().flatten(0, 1), BLOCK_TYPES[kind])

    def _product(self, name: str) -> ExpertWeights:
        kind, blocks = BLOCK_TYPES[self.kinds[name]], getattr(self, name).detach()
        bias = getattr(self, f"{name}_bias", None)
        channels, features = _halves(self.sizes, name)

        def parts(expert: int) -> Iterator[GroupedWeight]:
            yield kind.read(blocks[expert].view(channels, -1, kind.num_bytes))

        return ExpertWeights(channels, features, parts, bias, kind.name)


# --- a module for each expert ---

_NAMES = {
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3"),
    "down_proj": ("down_proj", "w2"),
}
"""Names of an expert's layers in files."""


class ExpertLayers(StoredExperts):
    """Experts of a checkpoint that has layers for each: ``<expert>.gate_proj`` and so on, each a
    ``StoredLinear``."""

    def __init__(self, name: str, own: Any, tensors: TensorIndex, place: Place) -> None:
        """Raises UnsupportedModelError where a layer has no place."""
        super().__init__(own)
        products = ("gate_proj",) * own.has_gate + ("up_proj", "down_proj")
        self.names = {each: _stored_name(name, each, tensors) or each for each in products}
        for expert in range(self.num_experts):
            layers = nn.Module()
            for product, stored in self.names.items():
                plain = _plain(own, *_halves(self.sizes, product))
                found = place(f"{name}.{expert}.{stored}", plain, tensors)
                if not isinstance(found, StoredLinear):
                    raise UnsupportedModelError(
                        f"{type(own).__name__}: experts in floats beside others in few bits"
                    )
                layers.add_module(stored, found)
                self.method = found.method
            self.add_module(str(expert), layers)

    def layers(self, name: str) -> list[StoredLinear]:
        """Returns a product's layers, of each expert."""
        experts: list[Any] = [self.get_submodule(str(each)) for each in range(self.num_experts)]
        return [getattr(each, self.names[name]) for each in experts]

    def weights(self) -> dict[str, ExpertWeights]:
        return {name: self._product(name) for name in self.names}

    def _product(self, name: str) -> ExpertWeights:
        layers = self.layers(name)
        biases: list[torch.Tensor] = [each.bias for each in layers if each.bias is not None]
        return ExpertWeights(
            layers[0].out_features,
            layers[0].in_features,
            lambda expert: layers[expert].parts(),
            torch.stack(biases) if len(biases) == len(layers) else None,
            layers[0].scheme,
            all(each.order is None for each in layers),
            lambda expert, dtype: layers[expert].dequantized(dtype),
        )


def _plain(own: Any, channels: int, features: int) -> nn.Linear:
    return nn.Linear(features, channels, bias=own.has_bias, device="meta")


def _stored_name(name: str, product: str, tensors: TensorIndex) -> str | None:
    """Returns the name that the first expert's layer has in the checkpoint; None: it has none."""
    names = (each for each in _NAMES[product] if tensors.has_module(f"{name}.0.{each}"))
    return next(names, None)


def place_experts(
    name: str, own: nn.Module, tensors: TensorIndex, place: Place
) -> ExpertLayers | None:
    """Returns the placeholder for a model's module; None: it is no experts module, or the checkpoint
    has no quantized layers for it."""
    sizes, down = expert_sizes(own), _stored_name(name, "down_proj", tensors)
    if not sizes or down is None:
        return None
    if place(f"{name}.0.{down}", _plain(own, *sizes["down_proj"]), tensors) is None:
        return None
    return ExpertLayers(name, own, tensors, place)
