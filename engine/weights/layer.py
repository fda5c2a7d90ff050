"""Layers of a quantized checkpoint: placeholders for its tensors, which transformers' loader fills, and
the meaning of these tensors.

They last from loading to packing (``engine.model.quantization``), and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.request.errors import UnsupportedModelError
from engine.weights.index import TensorIndex

_CHANNELS_AT_ONCE = 2048


def fixed(values: torch.Tensor) -> nn.Parameter:
    """Returns a parameter that is not trained, whatever its type."""
    return nn.Parameter(values, requires_grad=False)


def embed_scale(module: nn.Module) -> float | None:
    """Returns what an embedding multiplies with what it looks up, in the type of that; 1: nothing. None:
    the module does something else."""
    if type(module) is nn.Embedding:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, float | int):
        return None
    kind: Any = type(module)
    with torch.device("cpu"):  # models are made on another
        probed, ids = kind(3, 2, None, 0.7), torch.arange(3)
        expected = scaled(nn.functional.embedding(ids, probed.weight), 0.7)
        return float(scale) if torch.equal(probed(ids), expected) else None


def scaled(found: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns what was looked up times a scale, which is rounded to its type first."""
    return found if scale == 1.0 else found * _rounded(scale, found.dtype)


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """No tensor: one that is made in each forward would keep it from being recorded."""
    return torch.tensor(scale, device="cpu").to(dtype).item()


def room(
    tensors: TensorIndex, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]
) -> nn.Parameter:
    """Returns a parameter of the type that is stored, to be filled. Raises UnsupportedModelError where
    the tensor is missing, of another shape, or of none of these types."""
    found = tensors.get(name)
    if found is None:
        fault = "1 tensors that the configuration asks for are missing"
        raise UnsupportedModelError(f"{fault}: {name}")
    if found.shape != shape:
        raise UnsupportedModelError(
            "1 tensors have other shapes than the configuration says: "
            f"{name} {list(found.shape)} instead of {list(shape)}"
        )
    if found.dtype not in dtypes:
        wanted = ", ".join(map(type_name, dtypes))
        raise UnsupportedModelError(f"{name} is of {type_name(found.dtype)} instead of {wanted}")
    return fixed(torch.empty(shape, dtype=found.dtype))


def room_if(
    tensors: TensorIndex, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]
) -> nn.Parameter | None:
    """Returns the same for a tensor that may be missing; None: it is."""
    return room(tensors, name, shape, dtypes) if name in tensors else None


def type_name(dtype: torch.dtype | None) -> str:
    return "an unknown type" if dtype is None else str(dtype).removeprefix("torch.")


Place = Callable[[str, nn.Module, TensorIndex], nn.Module | None]
"""Takes a module's name, the module, and the tensors of safetensors files, if weights come from such;
returns what stands in the module's place, or None: it stays."""


class StoredWeight(nn.Module):
    """A weight matrix of a checkpoint, in ``nn.Linear``'s or ``nn.Embedding``'s place.

    ``scheme``: as shown to users, such as "Q4_K" or "4 bits, groups of 128, zero points". ``bits``: per
    weight. ``method``: the checkpoint's format. ``embed_scale``: factor for the vectors that an
    embedding looks up. ``order``: the input feature of each column, None: columns are in the features'
    order.
    """

    scheme: str
    method: str
    bits: float
    embed_scale: float = 1.0
    order: torch.Tensor | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def loaded(self, name: str) -> None:
        """Is called once, when the tensors are there. ``name``: the module's. Raises
        UnsupportedModelError where their values are none that the scheme has."""

    def part(self, first: int, end: int) -> GroupedWeight:
        """Returns the weights of output channels ``first`` to ``end - 1``."""
        raise NotImplementedError

    def parts(self) -> Iterator[GroupedWeight]:
        """Yields all channels' weights, some at a time, which bounds the memory that takes."""
        for first in range(0, self.out_features, _CHANNELS_AT_ONCE):
            yield self.part(first, min(first + _CHANNELS_AT_ONCE, self.out_features))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``[out_features, in_features]`` in the features' order."""
        weight = torch.cat([part.dequantized().to(dtype) for part in self.parts()])
        return weight if self.order is None else weight[:, self.order.argsort()]


class StoredLinear(StoredWeight):
    """A linear layer. ``bias``: ``[out_features]`` of the model's type, or None."""

    def __init__(
        self, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, out_features)
        self.bias = fixed(torch.empty(out_features, dtype=dtype)) if has_bias else None
