"""compressed-tensors' formats: integers packed into words or one to a byte, and 8-bit floats.

Each group of the configuration names layers, by class, name or "re:" and a pattern, and the kind of
their weights. Codes are signed numbers plus half their range. In the format "pack-quantized" a layer
has ``weight_packed`` int32 ``[out_features, in_features * bits / 32]``, ``weight_scale``
``[out_features, groups]``, ``weight_zero_point`` int32 ``[out_features * bits / 32, groups]`` unless it
is symmetric, ``weight_shape`` and maybe ``weight_g_idx``, each feature's group. In the others it has
``weight``, ``weight_scale`` and maybe ``weight_zero_point`` int8. Source: the package's compressors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.request.errors import UnsupportedModelError
from engine.weights.fields import Fields, Fits
from engine.weights.formats import fp8
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, room, room_if
from engine.weights.words import INDICES, SCALES, WordsLinear, num_words, unpack

logger = logging.getLogger(__name__)

PACKED, INTS, _FLOATS, _NAIVE = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
)
METHOD = "compressed-tensors"
_MIXED = "mixed-precision"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "weights": {**_INT8, "strategy": "channel"},
    "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
}
"""Weights by channel and inputs by token, which a kernel computes as they are."""


class _Scheme(NamedTuple):
    """A group of the configuration. ``layout``: the format, ``INTS`` or ``_FLOATS`` for a naive one.
    ``group_size``: -1: a row. ``block``: of floats, None where shapes say it. ``by_token``: inputs have
    one scale for each token, and weights one for each channel: a product of whole numbers.
    ``has_ranges``: the checkpoint has scales for inputs, too."""

    targets: Sequence[str | Fits]
    layout: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool
    by_token: bool
    has_ranges: bool


class ScaledLinear(WordsLinear):
    """A layer of whole numbers with ``weight_scale``: by group, by channel, or one for all."""

    method = METHOD

    def __init__(self, name: str, linear: nn.Linear, tensors: TensorIndex, scheme: _Scheme) -> None:
        super().__init__(name, linear, tensors, scheme.bits, scheme.group_size)
        self.is_packed, self.by_token = scheme.layout == PACKED, scheme.by_token
        shape: tuple[int, ...] = self.out_features, self.num_groups
        if scheme.strategy == "tensor":
            found = tensors.get(f"{name}.weight_scale")
            shape = found.shape if found and found.shape in ((), (1,), (1, 1)) else (1,)
        self.weight_scale = room(tensors, f"{name}.weight_scale", shape, SCALES)
        dtypes, width = (torch.int8,), self.in_features
        if self.is_packed:
            dtypes, width = (torch.int32,), num_words(self.in_features, scheme.bits)
            shape = num_words(self.out_features, scheme.bits), self.num_groups
        weight = room(tensors, f"{name}.{self._weight}", (self.out_features, width), dtypes)
        self.register_parameter(self._weight, weight)
        self.weight_zero_point = None
        if not scheme.symmetric:
            self.weight_zero_point = room(tensors, f"{name}.weight_zero_point", shape, dtypes)
        self.weight_g_idx = room_if(tensors, f"{name}.weight_g_idx", (self.in_features,), INDICES)
        self.weight_shape = None
        if self.is_packed:
            self.weight_shape = room_if(tensors, f"{name}.weight_shape", (2,), INDICES)
        self._describe(scheme.group_size, 8 * self.weight_scale.itemsize, not scheme.symmetric)

    @property
    def _weight(self) -> str:
        return "weight_packed" if self.is_packed else "weight"

    def loaded(self, name: str) -> None:
        sizes = [self.out_features, self.in_features]
        if self.weight_shape is not None and self.weight_shape.tolist() != sizes:
            raise UnsupportedModelError(
                f"{name}.weight_shape says {self.weight_shape.tolist()} instead of {sizes}"
            )
        zeros = self.weight_zero_point
        self._set_zeros(None if zeros is None else self._zeros(zeros.detach()))
        # The package fills with -1 what says nothing.
        if self.weight_g_idx is not None and bool((self.weight_g_idx != -1).any()):
            self._set_order(f"{name}.weight_g_idx", self.weight_g_idx)

    def _zeros(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns zero points ``[out_features, groups]`` as codes, or the only one."""
        if self.is_packed:
            return unpack(stored.T, self.code_bits)[:, : self.out_features].T
        zeros = _from_signed(stored)
        return zeros if zeros.shape == (self.out_features, self.num_groups) else zeros.view(1, 1)

    def codes(self, first: int, end: int) -> torch.Tensor:
        stored = self.get_parameter(self._weight).detach()[first:end]
        if not self.is_packed:
            return self._in_order(_from_signed(stored))
        return self._in_order(unpack(stored, self.code_bits)[:, : self.in_features])

    def group_scales(self, first: int, end: int) -> torch.Tensor:
        scales = self.weight_scale.detach()
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(end - first, 1)
        return scales[first:end]

    def part(self, first: int, end: int) -> GroupedWeight:
        part = super().part(first, end)
        if not self.by_token:
            return part
        scales = self.group_scales(first, end).float().flatten()
        return part._replace(scales=None, channel_scales=scales)


def _from_signed(values: torch.Tensor) -> torch.Tensor:
    """Returns int8 numbers plus 128, as uint8."""
    return values.contiguous().view(torch.uint8) ^ 128


def read(config: Any) -> Place:
    """Returns what gives places to the layers of a model with this ``quantization_config``. Raises
    UnsupportedModelError for variants that are not served."""
    fields = Fields(config, "quantization_config (compressed-tensors)")
    fields.text("quantization_status", ["compressed", "frozen"], "compressed")
    fields.nothing("transform_config")
    sparsity = fields.found.get("sparsity_config")
    if sparsity:
        Fields(sparsity, "sparsity_config").text("format", ["dense"], "dense")
    if fields.has("kv_cache_scheme"):
        logger.info("the checkpoint's scales for keys and values are left aside")
    layout = fields.text("format", [PACKED, INTS, _FLOATS, _NAIVE, _MIXED], "")
    groups = fields.found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.refused("config_groups", "groups of layers")
    schemes = [
        _read_scheme(Fields(group, f"config group {str(name)[:40]!r}"), layout)
        for name, group in groups.items()
    ]
    if any(each.layout == _FLOATS and each.has_ranges for each in schemes):
        fp8.say_ranges()
    ignored = fields.names("ignore")

    def place(name: str, module: nn.Module, tensors: TensorIndex) -> nn.Module | None:
        if type(module) is not nn.Linear or _how_near(ignored, name, module) is not None:
            return None
        fitting = [(_how_near(each.targets, name, module), each) for each in schemes]
        found = [(near, each) for near, each in fitting if near is not None]
        stored = tensors.get(f"{name}.weight")
        keeps_type = stored and stored.dtype in SCALES and f"{name}.weight_scale" not in tensors
        if not found or keeps_type:
            return None
        scheme = min(found, key=lambda pair: pair[0])[1]
        if scheme.layout == _FLOATS:
            return fp8.Fp8Linear(name, module, tensors, scheme.block)
        return ScaledLinear(name, module, tensors, scheme)

    return place


def _how_near(patterns: Sequence[str | Fits], name: str, module: nn.Module) -> int | None:
    """Returns how closely a pattern names the module: 0 by its name, 1 by a pattern, 2 by its class;
    None: not at all."""
    nearness = (
        (0, name in patterns),
        (1, any(callable(each) and each(name) for each in patterns)),
        (2, type(module).__name__ in patterns),
    )
    return next((near for near, fits in nearness if fits), None)


def _read_scheme(group: Fields, layout: str) -> _Scheme:
    targets = group.names("targets")
    if group.has("format") or layout == _MIXED:
        layout = group.text("format", [PACKED, INTS, _FLOATS, _NAIVE])
    weights = Fields(group.found.get("weights"), f"{group.where}: weights")
    weights.nothing("dynamic")
    group.nothing("output_activations")
    kind = weights.text("type", ["int", "float"], "int")
    if layout != _NAIVE and (kind == "float") != (layout == _FLOATS):
        raise weights.refused("type", f"{'float' if layout == _FLOATS else 'int'} in {layout}")
    layout = {_NAIVE: _FLOATS if kind == "float" else INTS}.get(layout, layout)
    bits = weights.integer("num_bits", (4, 8) if layout == PACKED else (8,), 8)
    strategy, group_size = _read_groups(weights, layout)
    symmetric = weights.flag("symmetric", True)
    block, by_token, has_ranges = None, False, False
    if layout == _FLOATS:
        if not symmetric:
            raise weights.refused("symmetric", "true for floats")
        block = (1, group_size) if strategy == "group" else None
        block = fp8.read_block(weights, "block_structure") if strategy == "block" else block
        inputs = group.found.get("input_activations")
        has_ranges = isinstance(inputs, Mapping) and not inputs.get("dynamic")
    elif group.has("input_activations"):
        _check_inputs(group, layout)
        by_token = symmetric and strategy == "channel"
    return _Scheme(
        targets, layout, bits, strategy, group_size, block, symmetric, by_token, has_ranges
    )


def _read_groups(weights: Fields, layout: str) -> tuple[str, int]:
    """Returns the strategy and the features in a group, -1: a row."""
    size = weights.group_size("group_size", -1)
    served = ["group", "channel", "tensor"] + ["block"] * (layout == _FLOATS)
    strategy = weights.text("strategy", served, "channel" if size == -1 else "group")
    if strategy == "group" and size == -1:
        raise weights.refused("group_size", "multiples of 32")
    if strategy == "block" and not weights.has("block_structure"):
        raise weights.refused("block_structure", "two positive numbers")
    if strategy == "tensor" and layout == PACKED:
        raise weights.refused("strategy", "group, channel")
    return strategy, size if strategy == "group" else -1


def _check_inputs(group: Fields, layout: str) -> None:
    """Raises UnsupportedModelError where inputs have something else than one scale for each token."""
    if layout == PACKED:
        raise group.refused("input_activations", "nothing with packed weights")
    given = Fields(group.found["input_activations"], f"{group.where}: input_activations")
    for key, served in SCHEME["input_activations"].items():
        if given.found.get(key) != served:
            raise given.refused(key, f"{served!r}: inputs in 8 bits by token")
