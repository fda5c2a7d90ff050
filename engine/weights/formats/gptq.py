"""The format of AutoGPTQ and GPTQModel: 4 or 8 bits, groups of features, which may be in any order.

A layer has ``qweight`` int32 ``[in_features * bits / 32, out_features]``, ``qzeros`` int32 ``[groups,
out_features * bits / 32]``, ``scales`` ``[groups, out_features]`` and, as a rule, ``g_idx``
``[in_features]``, each feature's group. Weights are ``(code - zero) * scale``. The format "gptq" holds
words from which a one is subtracted in each code's place, so that a zero point of 0 borrows from its
neighbour; "gptq_v2" holds zero points. Sources: AutoGPTQ's ``QuantLinear``, GPTQModel's conversion of
the first format to the second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.weights.fields import Fields, Fits
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, room, room_if
from engine.weights.words import INDICES, SCALES, WordsLinear, num_words, unpack

_BITS = (4, 8)
_ONES = {4: 0x11111111, 8: 0x01010101}


class GptqLinear(WordsLinear):
    """A layer's tensors as AutoGPTQ writes them. ``is_v1``: a one is missing from zero points."""

    method = "gptq"

    def __init__(
        self,
        name: str,
        linear: nn.Linear,
        tensors: TensorIndex,
        bits: int,
        group_size: int,
        is_v1: bool,
    ) -> None:
        super().__init__(name, linear, tensors, bits, group_size)
        self.is_v1 = is_v1
        words = num_words(self.in_features, bits)
        self.qweight = room(tensors, f"{name}.qweight", (words, self.out_features), (torch.int32,))
        shape = self.num_groups, num_words(self.out_features, bits)
        self.qzeros = room(tensors, f"{name}.qzeros", shape, (torch.int32,))
        shape = self.num_groups, self.out_features
        self.scales = room(tensors, f"{name}.scales", shape, SCALES)
        self.g_idx = room_if(tensors, f"{name}.g_idx", (self.in_features,), INDICES)
        self._group_size = group_size
        self._describe(group_size, 8 * self.scales.itemsize, True)

    def loaded(self, name: str) -> None:
        words = self.qzeros.detach()
        words = words + _ONES[self.code_bits] if self.is_v1 else words
        self._set_zeros(unpack(words, self.code_bits)[:, : self.out_features].T)
        if self.g_idx is not None:
            self._set_order(f"{name}.g_idx", self.g_idx)
        self._describe(self._group_size, 8 * self.scales.itemsize, self.zeros is not None)

    def codes(self, first: int, end: int) -> torch.Tensor:
        codes = unpack(self.qweight.detach()[:, first:end].T, self.code_bits)
        return self._in_order(codes[:, : self.in_features])

    def group_scales(self, first: int, end: int) -> torch.Tensor:
        return self.scales[:, first:end].T.contiguous()


def read(config: Any) -> Place:
    """Returns the factory of placeholders for the quantized layers of a model with this
    ``quantization_config``, including the output head. Raises UnsupportedModelError for unsupported
    variants."""
    fields = Fields(config, "quantization_config (gptq)")
    fields.integer("bits", _BITS)
    fields.group_size("group_size", 128)
    for key in ("checkpoint_format", "format"):
        fields.text(key, ["gptq", "gptq_v2"], "gptq")
    layout = fields.text(fields.first("checkpoint_format", "format"), ["gptq", "gptq_v2"], "gptq")
    fields.text("pack_dtype", ["int32"], "int32")
    fields.nothing("is_marlin_format")
    for key in ("desc_act", "sym", "lm_head"):
        fields.flag(key, False)  # the tensors say it
    dynamic = _read_dynamic(fields)

    def place(name: str, module: nn.Module, tensors: TensorIndex) -> nn.Module | None:
        if type(module) is not nn.Linear or f"{name}.qweight" not in tensors:
            return None
        own = _fields_of(name, fields, dynamic)
        bits = own.integer("bits", _BITS)
        group_size = own.group_size("group_size", 128)
        return GptqLinear(name, module, tensors, bits, group_size, layout == "gptq")

    return place


def _read_dynamic(fields: Fields) -> list[tuple[Fits, Fields]]:
    """Returns the patterns of modules that have fields of their own, and those fields."""
    given = fields.found.get("dynamic") or {}
    if not isinstance(given, Mapping) or any(type(each) is not str for each in given):
        raise fields.refused("dynamic", "an object of patterns")
    found = []
    for text, changes in given.items():
        pattern = fields.pattern("dynamic", re.sub(r"^[+-]:", "", text))
        if text.startswith("-:"):
            changes = {}  # these layers keep their type, which the tensors say
        own = Fields(changes, f"quantization_config (gptq), dynamic {text!r},")
        own.integer("bits", _BITS, _BITS[0])
        own.group_size("group_size", 128)
        found.append((pattern, own))
    return found


def _fields_of(name: str, fields: Fields, dynamic: list[tuple[Fits, Fields]]) -> Fields:
    """Returns a module's fields: the first pattern that fits its name changes those of all."""
    for pattern, own in dynamic:
        if pattern(name):
            return Fields({**fields.found, **own.found}, own.where)
    return fields
