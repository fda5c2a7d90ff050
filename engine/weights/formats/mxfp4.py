"""Experts in MXFP4, as gpt-oss is published: 4 bits from a table of 16 numbers, and an exponent for each
32 features.

A product has ``<name>_blocks`` uint8 ``[experts, out_features, in_features / 32, 16]``, of whose bytes
the lower half is the earlier feature, ``<name>_scales`` uint8 ``[experts, out_features, in_features /
32]``, exponents plus 127, and ``<name>_bias``. Source: the Open Compute Project's specification of
microscaling formats, 1.0, and gpt-oss' files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.request.errors import UnsupportedModelError
from engine.weights.experts import ExpertWeights, StoredExperts, expert_sizes
from engine.weights.fields import Fields
from engine.weights.gguf.blocks import from_mxfp4, largest_mxfp4
from engine.weights.index import TensorIndex
from engine.weights.layer import Place, room
from engine.weights.words import SCALES

_SPAN = 32
_BYTES = (torch.uint8,)


class Mxfp4Experts(StoredExperts):
    """A layer's experts."""

    method = "mxfp4"

    def __init__(self, name: str, own: Any, tensors: TensorIndex) -> None:
        super().__init__(own)
        for product, (channels, features) in self.sizes.items():
            if features % _SPAN:
                raise UnsupportedModelError(
                    f"{name}.{product}: {features} features do not divide into groups of {_SPAN}"
                )
            groups = self.num_experts, channels, features // _SPAN
            shapes: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
            shapes = {"blocks": ((*groups, _SPAN // 2), _BYTES), "scales": (groups, _BYTES)}
            if own.has_bias:
                shapes["bias"] = ((self.num_experts, channels), SCALES)
            for part, (shape, dtypes) in shapes.items():
                own_name = f"{product}_{part}"
                self.register_parameter(
                    own_name, room(tensors, f"{name}.{own_name}", shape, dtypes)
                )

    def loaded(self, name: str) -> None:
        for product in self.sizes:
            exponents = getattr(self, f"{product}_scales").detach()
            if not bool(largest_mxfp4(exponents).isfinite().all()):
                raise UnsupportedModelError(f"weights that are not finite: {name}.{product}_scales")

    def weights(self) -> dict[str, ExpertWeights]:
        return {name: self._product(name) for name in self.sizes}

    def _product(self, name: str) -> ExpertWeights:
        own: Any = vars(self)["own"]
        blocks, exponents = (
            getattr(self, f"{name}_{part}").detach() for part in ("blocks", "scales")
        )
        bias = getattr(self, f"{name}_bias").detach() if own.has_bias else None
        # Channels of gates and others in turn.
        order = torch.arange(self.sizes[name][0], device=blocks.device)
        if name == "gate_up_proj" and not own.is_concatenated:
            order = order.view(-1, 2).T.flatten()

        def parts(expert: int) -> Iterator[GroupedWeight]:
            octets = blocks[expert][order]
            codes = torch.stack((octets & 15, octets >> 4), -1).flatten(2)
            yield from_mxfp4(codes, exponents[expert][order])

        bias = None if bias is None else bias[:, order]
        return ExpertWeights(*self.sizes[name], parts, bias, "MXFP4")


def read(config: Any) -> Place:
    """Returns the factory of placeholders for the quantized experts of a model with this
    ``quantization_config``."""
    Fields(config, "quantization_config (mxfp4)").names("modules_to_not_convert")

    def place(name: str, module: nn.Module, tensors: TensorIndex) -> nn.Module | None:
        if not expert_sizes(module) or f"{name}.down_proj_blocks" not in tensors:
            return None
        return Mxfp4Experts(name, module, tensors)

    return place
