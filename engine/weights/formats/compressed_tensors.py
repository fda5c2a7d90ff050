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
from engine.weights.layer import Place, StoredLinear, fixed, room
from engine.weights.words import (
    INDICES,
    SCALES,
    WordsLinear,
    num_words,
    unpack,
)

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


class StoredInt8Linear(StoredLinear):
    """A layer whose weights have a scale for each channel, and whose inputs one for each token.

    ``weight`` ``[out_features, in_features]`` int8, ``weight_scale`` ``[out_features, 1]``.
    """

    scheme = "8 bits, a scale per channel"
    method = METHOD

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype)
        self.weight = fixed(torch.empty(out_features, in_features, dtype=torch.int8))
        self.weight_scale = fixed(torch.empty(out_features, 1, dtype=scale_dtype))
        self.bits = 8 + 8 * self.weight_scale.itemsize / in_features

    def part(self, first: int, end: int) -> GroupedWeight:
        return GroupedWeight(
            codes=_from_signed(self.weight[first:end]),
            bits=8,
            zero=128,
            span=self.in_features,
            scales=None,
            channel_scales=self.weight_scale[first:end].detach().float().flatten(),
        )


def _from_signed(values: torch.Tensor) -> torch.Tensor:
    """Returns int8 numbers plus 128, as uint8."""
    return values.detach().contiguous().view(torch.uint8) ^ 128


class _Scheme(NamedTuple):
    """A group of the configuration. ``layout``: the format, ``INTS`` or ``_FLOATS`` for a naive one.
    ``group_size``: -1: a row. ``block``: of floats, None where shapes say it. ``by_token``: inputs have
    one scale for each token. ``has_ranges``: the checkpoint has scales for inputs, too."""

    targets: Sequence[str | Fits]
    layout: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool
    by_token: bool
    has_ranges: bool = False


class _Scaled(WordsLinear):
    """A layer with ``weight_scale``: by group, by channel, or one for all."""

    method = METHOD

    def __init__(self, name: str, linear: nn.Linear, tensors: TensorIndex, scheme: _Scheme) -> None:
        super().__init__(name, linear, tensors, scheme.bits, scheme.group_size)
        shape: tuple[int, ...] = self.out_features, self.num_groups
        if scheme.strategy == "tensor":
            found = tensors.get(f"{name}.weight_scale")
            shape = found.shape if found and found.shape in ((), (1,), (1, 1)) else (1,)
        self.weight_scale = room(tensors, f"{name}.weight_scale", shape, SCALES)
        self.weight_g_idx = None
        if f"{name}.weight_g_idx" in tensors:
            shape = (self.in_features,)
            self.weight_g_idx = room(tensors, f"{name}.weight_g_idx", shape, INDICES)
        self._describe(scheme.group_size, 8 * self.weight_scale.itemsize, not scheme.symmetric)

    def loaded(self, name: str) -> None:
        self._set_zeros(self._zeros())
        # The package fills with -1 what says nothing.
        if self.weight_g_idx is not None and bool((self.weight_g_idx != -1).any()):
            self._set_order(f"{name}.weight_g_idx", self.weight_g_idx)

    def _zeros(self) -> torch.Tensor | None:
        """Returns zero points ``[out_features, groups]`` as codes, None where there are none."""
        raise NotImplementedError

    def group_scales(self, first: int, end: int) -> torch.Tensor:
        scales = self.weight_scale.detach()
        if scales.ndim < 2 or len(scales) == 1:
            return scales.reshape(1, 1).expand(end - first, 1)
        return scales[first:end]


class PackedLinear(_Scaled):
    """A layer in the format "pack-quantized"."""

    def __init__(self, name: str, linear: nn.Linear, tensors: TensorIndex, scheme: _Scheme) -> None:
        super().__init__(name, linear, tensors, scheme)
        words = self.out_features, num_words(self.in_features, scheme.bits)
        self.weight_packed = room(tensors, f"{name}.weight_packed", words, (torch.int32,))
        self.weight_zero_point = None
        if not scheme.symmetric:
            shape = num_words(self.out_features, scheme.bits), self.num_groups
            zeros = room(tensors, f"{name}.weight_zero_point", shape, (torch.int32,))
            self.weight_zero_point = zeros
        self.weight_shape = None
        if f"{name}.weight_shape" in tensors:
            self.weight_shape = room(tensors, f"{name}.weight_shape", (2,), INDICES)

    def loaded(self, name: str) -> None:
        sizes = [self.out_features, self.in_features]
        if self.weight_shape is not None and self.weight_shape.tolist() != sizes:
            raise UnsupportedModelError(
                f"{name}.weight_shape says {self.weight_shape.tolist()} instead of {sizes}"
            )
        super().loaded(name)

    def _zeros(self) -> torch.Tensor | None:
        if self.weight_zero_point is None:
            return None
        codes = unpack(self.weight_zero_point.detach().T, self.code_bits)
        return codes[:, : self.out_features].T

    def codes(self, first: int, end: int) -> torch.Tensor:
        codes = unpack(self.weight_packed.detach()[first:end], self.code_bits)
        return self._in_order(codes[:, : self.in_features])


class IntLinear(_Scaled):
    """A layer of signed bytes with scales by group, or with zero points."""

    def __init__(self, name: str, linear: nn.Linear, tensors: TensorIndex, scheme: _Scheme) -> None:
        super().__init__(name, linear, tensors, scheme)
        sizes = self.out_features, self.in_features
        self.weight = room(tensors, f"{name}.weight", sizes, (torch.int8,))
        self.weight_zero_point = None
        if not scheme.symmetric:
            shape = tuple(self.weight_scale.shape)
            self.weight_zero_point = room(
                tensors, f"{name}.weight_zero_point", shape, (torch.int8,)
            )

    def _zeros(self) -> torch.Tensor | None:
        if self.weight_zero_point is None:
            return None
        zeros = _from_signed(self.weight_zero_point)
        return zeros if zeros.shape == (self.out_features, self.num_groups) else zeros.view(1, 1)

    def codes(self, first: int, end: int) -> torch.Tensor:
        return self._in_order(_from_signed(self.weight[first:end]))


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
        if not found:
            return None
        scheme = min(found, key=lambda pair: pair[0])[1]
        return _make(name, module, tensors, scheme)

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


def _make(
    name: str, linear: nn.Linear, tensors: TensorIndex, scheme: _Scheme
) -> StoredLinear | None:
    """Returns the place; None for a layer that the checkpoint holds in a type of its own."""
    stored = tensors.get(f"{name}.weight")
    if stored and stored.dtype in SCALES and f"{name}.weight_scale" not in tensors:
        return None
    if scheme.layout == PACKED:
        return PackedLinear(name, linear, tensors, scheme)
    if scheme.layout == _FLOATS:
        block = scheme.block
        if scheme.strategy == "group":
            block = 1, scheme.group_size
        return fp8.Fp8Linear(name, linear, tensors, block)
    if not scheme.by_token:
        return IntLinear(name, linear, tensors, scheme)
    sizes = linear.out_features, linear.in_features
    room(tensors, f"{name}.weight", sizes, (torch.int8,))
    scale = room(tensors, f"{name}.weight_scale", (sizes[0], 1), SCALES)
    has_bias = linear.bias is not None or f"{name}.bias" in tensors
    return StoredInt8Linear(*sizes[::-1], has_bias, linear.weight.dtype, scale.dtype)


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
    if layout == _FLOATS:
        if not symmetric:
            raise weights.refused("symmetric", "true for floats")
        block = fp8.read_block(weights, "block_structure") if strategy == "block" else None
        inputs = group.found.get("input_activations")
        has_ranges = isinstance(inputs, Mapping) and not inputs.get("dynamic")
        return _Scheme(
            targets, layout, bits, strategy, group_size, block, symmetric, False, has_ranges
        )
    by_token = _read_inputs(group, layout) and symmetric and strategy == "channel"
    return _Scheme(targets, layout, bits, strategy, group_size, None, symmetric, by_token)


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


def _read_inputs(group: Fields, layout: str) -> bool:
    """Returns whether inputs have one scale for each token; raises UnsupportedModelError where they have
    something else than that or nothing."""
    if not group.has("input_activations"):
        return False
    if layout == PACKED:
        raise group.refused("input_activations", "nothing with packed weights")
    given = Fields(group.found["input_activations"], f"{group.where}: input_activations")
    wrong = [
        key for key, value in SCHEME["input_activations"].items() if given.found.get(key) != value
    ]
    if wrong:
        said = ", ".join(f"{key}={given.found.get(key)!r}"[:60] for key in wrong)
        raise UnsupportedModelError(
            f"the checkpoint's input_activations have {said}; in 8 bits they are served by token, "
            "dynamic and symmetric"
        )
    return True
