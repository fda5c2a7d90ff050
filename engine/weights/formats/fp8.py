"""Weights in 8-bit floats with scales by tensor, channel or block.

A layer has ``weight`` e4m3 or e5m2 ``[out_features, in_features]`` and ``weight_scale`` (or
``weight_scale_inv``, which is multiplied all the same), maybe ``input_scale``: ranges of inputs, which
have the model's type here. Sources: DeepSeek-V3's and Qwen's checkpoints, AutoFP8, compressed-tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.request.errors import UnsupportedModelError
from engine.weights.fields import Fields
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, StoredLinear, room
from engine.weights.words import SCALES

logger = logging.getLogger(__name__)

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUTS = ("input_scale", "activation_scale")
_SIDES = range(1, 1 << 16)


class Fp8Linear(StoredLinear):
    """A layer's tensors. ``block``: rows and columns that share a scale; a channel's are 1 and all."""

    method = "fp8"

    def __init__(
        self, name: str, linear: nn.Linear, tensors: TensorIndex, block: tuple[int, int] | None
    ) -> None:
        """``block`` None: the scales' shape says whether there is one or one for each channel. Raises
        UnsupportedModelError where scales are missing or do not fit."""
        has_bias = linear.bias is not None or f"{name}.bias" in tensors
        super().__init__(linear.in_features, linear.out_features, has_bias, linear.weight.dtype)
        sizes = linear.out_features, linear.in_features
        self.weight = room(tensors, f"{name}.weight", sizes, FLOATS)
        self._scale = next((key for key in _SCALES if f"{name}.{key}" in tensors), _SCALES[1])
        found = tensors.get(f"{name}.{self._scale}")
        block_size = block or _block_of(name, found.shape if found else (), sizes)
        # What a configuration claims takes no memory beyond the layer.
        self.block = min(block_size[0], sizes[0]), min(block_size[1], sizes[1])
        grid = tuple(-(-size // side) for size, side in zip(sizes, self.block, strict=True))
        shape = found.shape if found and block is None else grid
        scale = room(tensors, f"{name}.{self._scale}", shape, (*SCALES, torch.float8_e8m0fnu))
        setattr(self, self._scale, scale)
        self._grid = grid
        for key in _INPUTS:
            stored = tensors.get(f"{name}.{key}")
            if stored:
                setattr(self, key, room(tensors, f"{name}.{key}", stored.shape, SCALES))
        self.bits = 8 + 8 * scale.itemsize * scale.numel() / self.weight.numel()
        self.scheme = f"FP8, {self._said(sizes)}"

    def _said(self, sizes: tuple[int, int]) -> str:
        if self._grid == (1, 1):
            return "a scale per tensor"
        if self.block == (1, sizes[1]):
            return "a scale per channel"
        return f"blocks of {self.block[0]} x {self.block[1]}"

    def loaded(self, name: str) -> None:
        del name
        for key in _INPUTS:
            if hasattr(self, key):
                delattr(self, key)

    def part(self, first: int, end: int) -> GroupedWeight:
        scales = getattr(self, self._scale).detach().float().reshape(self._grid)
        rows, columns = self.block
        of_row = torch.arange(first, end, device=scales.device) // rows
        return GroupedWeight(self.weight[first:end].detach(), 8, 0, columns, scales[of_row])


def _block_of(name: str, scale: tuple[int, ...], sizes: tuple[int, int]) -> tuple[int, int]:
    """Returns rows and columns that share a scale, where there is one for each channel or for all."""
    if scale in ((sizes[0],), (sizes[0], 1)) and sizes[0] > 1:
        return 1, sizes[1]
    if scale not in ((), (1,), (1, 1)):
        raise UnsupportedModelError(
            f"{name} has scales {list(scale)}: of weights {list(sizes)} they are neither one nor one for "
            "each channel"
        )
    return sizes


def say_ranges() -> None:
    """Says in the log that inputs keep their type."""
    logger.info("the ranges that the checkpoint has for inputs of FP8 layers are left aside")


def read_block(fields: Fields, key: str) -> tuple[int, int] | None:
    """Returns rows and columns that share a scale, None where the field says nothing."""
    found = fields.found.get(key)
    if found is None:
        return None
    if (
        not isinstance(found, list | tuple)
        or len(found) != 2
        or any(type(side) is not int or side not in _SIDES for side in found)
    ):
        raise fields.refused(key, "two positive numbers")
    return found[0], found[1]


def read(config: Any) -> Place:
    """Returns what gives places to the layers of a model with this ``quantization_config``: those whose
    weights have 8 bits. Raises UnsupportedModelError for variants that are not served."""
    fields = Fields(config, "quantization_config (fp8)")
    activations = fields.text("activation_scheme", ["dynamic", "static"], "dynamic")
    fields.text("fmt", ["e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"], "e4m3")
    fields.text("scale_fmt", ["float", "ue8m0"], "float")
    fields.text("expert_dtype", ["fp8"], "fp8")
    fields.names("modules_to_not_convert")
    fields.names("ignored_layers")
    block = read_block(fields, "weight_block_size")
    if activations == "static":
        say_ranges()

    def place(name: str, module: nn.Module, tensors: TensorIndex) -> nn.Module | None:
        found = tensors.get(f"{name}.weight")
        if type(module) is not nn.Linear or found is None or found.dtype not in FLOATS:
            return None
        return Fp8Linear(name, module, tensors, block)

    return place
