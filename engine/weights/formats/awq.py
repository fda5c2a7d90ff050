"""AutoAWQ's format: 4 bits, groups of features with zero points, in the version "gemm".

A layer has ``qweight`` int32 ``[in_features, out_features / 8]``, ``qzeros`` int32 ``[groups,
out_features / 8]`` and ``scales`` ``[groups, out_features]``. A word's nibbles, from the lowest, are of
the channels 0, 2, 4, 6, 1, 3, 5 and 7 of eight. Weights are ``(code - zero) * scale``. Source:
AutoAWQ's ``WQLinear_GEMM``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.request.errors import UnsupportedModelError
from engine.weights.fields import Fields
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, room
from engine.weights.words import SCALES, WordsLinear, unpack

_BITS = 4
_IN_WORD = 32 // _BITS
_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Which nibble of a word is each channel's."""


class AwqLinear(WordsLinear):
    """A layer's tensors as AutoAWQ writes them."""

    method = "awq"

    def __init__(self, name: str, linear: nn.Linear, tensors: TensorIndex, group_size: int) -> None:
        super().__init__(name, linear, tensors, _BITS, group_size)
        if self.in_features % self.span or self.out_features % _IN_WORD:
            raise UnsupportedModelError(
                f"{name} is {self.in_features} x {self.out_features}, which does not divide into groups "
                f"of {self.span} features and {_IN_WORD} channels"
            )
        words = self.out_features // _IN_WORD
        self.qweight = room(tensors, f"{name}.qweight", (self.in_features, words), (torch.int32,))
        self.qzeros = room(tensors, f"{name}.qzeros", (self.num_groups, words), (torch.int32,))
        shape = self.num_groups, self.out_features
        self.scales = room(tensors, f"{name}.scales", shape, SCALES)
        self._describe(group_size, 8 * self.scales.itemsize, True)
        self._group_size = group_size

    def loaded(self, name: str) -> None:
        del name
        self._set_zeros(_unpack(self.qzeros).T)
        self._describe(self._group_size, 8 * self.scales.itemsize, self.zeros is not None)

    def codes(self, first: int, end: int) -> torch.Tensor:
        word, last = first // _IN_WORD, -(-end // _IN_WORD)
        channels = _unpack(self.qweight[:, word:last])
        start = first - word * _IN_WORD
        return channels[:, start : start + end - first].T.contiguous()

    def group_scales(self, first: int, end: int) -> torch.Tensor:
        return self.scales[:, first:end].T.contiguous()


def _unpack(words: torch.Tensor) -> torch.Tensor:
    nibbles: torch.Tensor = unpack(words.detach(), _BITS).unflatten(1, (-1, _IN_WORD))
    return nibbles[:, :, _NIBBLES].flatten(1)


def read(config: Any) -> Place:
    """Returns the factory of placeholders for the quantized layers of a model with this
    ``quantization_config``. Raises UnsupportedModelError for unsupported variants."""
    fields = Fields(config, "quantization_config (awq)")
    fields.integer(fields.first("bits", "w_bit"), [_BITS], _BITS)
    group_size = fields.group_size(fields.first("group_size", "q_group_size"), 128)
    fields.text(fields.first("version", "checkpoint_format", "format"), ["gemm"], "gemm")
    fields.flag("zero_point", True)  # symmetric files have the same zero point everywhere
    fields.names("modules_to_not_convert")

    def place(name: str, module: nn.Module, tensors: TensorIndex) -> nn.Module | None:
        if type(module) is not nn.Linear or f"{name}.qweight" not in tensors:
            return None
        return AwqLinear(name, module, tensors, group_size)

    return place
