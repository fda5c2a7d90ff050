"""The parameters of a model, read from a GGUF file: blocks go to the places that hold them as they are,
everything else becomes values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.weights.experts import GgufExperts, expert_sizes
from engine.weights.gguf.blocks import BLOCK_TYPES, GgufEmbedding, GgufWeight
from engine.weights.gguf.conversion import Array, Undo
from engine.weights.gguf.file import GgufHeader
from engine.weights.gguf.parameters import Making, bytes_of, plan, refuse, values_of
from engine.weights.index import StoredTensor, TensorIndex
from engine.weights.layer import Place, embed_scale

logger = logging.getLogger(__name__)

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types of tensors that are values, not blocks: the first that a file has is its own."""


class Reading:
    """Maps each tensor of a file to its destination. ``undo``: what the conversion did. ``skeleton``: the
    model, on the device "meta"."""

    def __init__(
        self,
        header: GgufHeader,
        config: Any,
        undo: Sequence[Undo],
        skeleton: PreTrainedModel,
        dtype: torch.dtype,
        packed: bool,
    ) -> None:
        self._header, self._config, self._dtype = header, config, dtype
        self._modules = dict(skeleton.named_modules(remove_duplicate=False))
        self._num_dequantised: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        """The types of modules that keep their blocks, by names of modules."""
        self._orders: dict[str, torch.Tensor] = {}
        """Which features their columns are for, where these are in another order."""
        self._packed: dict[str, list[str]] = {}
        """Names of the modules that get a parameter's blocks, by its name."""
        self._experts: dict[str, dict[str, str]] = {}
        """The types of experts that keep their blocks, by names of modules and of products."""
        self._products: dict[str, list[tuple[str, tuple[StoredTensor, ...]]]] = {}
        """Replacements of experts' parameters by name, each with its tensors."""
        tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
        self._makings, said = plan(header, config, undo, skeleton.state_dict(), tied)
        self._said = {name: value.to(dtype) for name, value in said.items()}
        if packed:
            self._pack(tied)
            for name, module in self._modules.items():
                self._pack_experts(name, module)

    def placing(self) -> Place:
        """Returns what makes a place for the blocks of a module, if it keeps them. It holds no tensors:
        transformers copies configurations, with all that they refer to, several times."""
        kinds, experts, dtype = self._kinds, self._experts, self._dtype
        orders = self._orders

        def place(name: str, module: nn.Module, tensors: TensorIndex) -> nn.Module | None:
            del tensors  # of safetensors files
            if name in experts:
                return GgufExperts(module, experts[name], dtype)
            kind = kinds.get(name)
            if kind is None:
                return None
            if isinstance(module, nn.Embedding):
                scale = embed_scale(module)
                assert scale is not None
                return GgufEmbedding(kind, module.num_embeddings, module.embedding_dim, scale)
            assert isinstance(module, nn.Linear)
            has_bias = module.bias is not None
            found = GgufWeight(kind, module.in_features, module.out_features, has_bias, dtype)
            found.order = orders.get(name)
            return found

        return place

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the model's parameters by name: blocks as they are, everything else in its type.
        Raises UnsupportedModelError for those of other shapes than the model's."""
        found, wrong = dict(self._said), []
        for name, making in self._makings.items():
            if name in self._products:
                found |= {each: self._product(parts) for each, parts in self._products[name]}
                continue
            data = [bytes_of(part) for part in making.parts]
            names = self._packed.get(name, [])
            if names:
                rows = [
                    each.reshape(part.shape[-2], -1)
                    for each, part in zip(data, making.parts, strict=True)
                ]
                blocks = torch.from_numpy(making.stacked(self._config, rows))
                found |= dict.fromkeys(names, blocks)
            if name in names:
                continue
            values = self._values(making, data)
            if _is_of_shape(values, making.shape):
                found[name] = values.reshape(making.shape)
            else:
                wrong.append(f"{name} {list(values.shape)} instead of {list(making.shape)}")
        refuse("tensors have other shapes than the configuration says", wrong)
        if self._num_dequantised:
            counted = self._num_dequantised.most_common()
            said = ", ".join(f"{count} tensors of type {kind}" for kind, count in counted)
            logger.info("dequantised: %s", said)
        return found

    def _values(self, making: Making, data: Sequence[Array]) -> torch.Tensor:
        for part in making.parts:
            if part.kind not in FLOATS:
                self._num_dequantised[part.kind] += 1
        parts = [values_of(part, each) for part, each in zip(making.parts, data, strict=True)]
        try:
            values = making.joined(self._config, parts)
        except (ValueError, IndexError):  # of sizes that its order cannot have
            values = np.concatenate([each.reshape(-1) for each in parts])
        found = torch.from_numpy(np.ascontiguousarray(values))
        # Of what lies there in float32 transformers keeps some so: routers' biases, to which it matters.
        return found if all(part.kind == "F32" for part in making.parts) else found.to(self._dtype)

    def _pack(self, tied: Mapping[str, str]) -> None:
        """Decides which modules keep their blocks. ``tied``: aliases of parameters, by name. If one
        module sharing blocks cannot use them, the others get separate ones."""
        for name, making in self._makings.items():
            if not making.keeps_rows:
                continue
            sharing = [
                each
                for each, source in tied.items()
                if source == name and each not in self._makings
            ]
            taking = [each for each in (name, *sharing) if self._takes_blocks(each, making)]
            has_all = len(taking) == 1 + len(sharing)
            names = taking if has_all else [each for each in taking if each != name]
            self._kinds |= {_module_of(each): making.parts[0].kind for each in names}
            if names:
                self._packed[name] = [name] if has_all else names
            if names and (order := making.features(self._config)) is not None:
                self._orders[_module_of(name)] = order

    def _pack_experts(self, name: str, module: nn.Module) -> None:
        """Decides whether a layer's experts keep their blocks: all of their products have to."""
        kinds: dict[str, str] = {}
        products = {}
        for own, (channels, features) in expert_sizes(module).items():
            making = self._makings[f"{name}.{own}"]
            parts, count = making.parts, len(making.parts)
            wanted = (making.shape[0], channels // count, features)
            if any(each.shape != wanted or each.kind not in BLOCK_TYPES for each in parts):
                return
            # One product, where both are of one type.
            are_apart = len({each.kind for each in parts}) > 1
            names = [own] if not are_apart else ["gate_proj", "up_proj"]
            for end in ("", "_bias"):
                if (whole := self._makings.get(f"{name}.{own}{end}")) is not None:
                    own_parts = [(part,) for part in whole.parts] if are_apart else [whole.parts]
                    products[f"{name}.{own}{end}"] = [
                        (f"{name}.{each}{end}", several)
                        for each, several in zip(names, own_parts, strict=True)
                    ]
            kinds |= {each: part.kind for each, part in zip(names, parts, strict=False)}
        if kinds:
            self._experts[name] = kinds
            self._products |= products

    def _product(self, parts: Sequence[StoredTensor]) -> torch.Tensor:
        """Returns blocks, or biases, of all experts."""
        read = []
        for part in parts:
            data, shape = bytes_of(part), part.shape[:-1]
            is_packed = part.kind in BLOCK_TYPES
            read.append(data.reshape(*shape, -1) if is_packed else values_of(part, data))
        whole = torch.from_numpy(read[0] if len(read) == 1 else np.concatenate(read, axis=1))
        return whole if whole.dtype == torch.uint8 else whole.to(self._dtype)

    def _takes_blocks(self, name: str, making: Making) -> bool:
        module = self._modules.get(_module_of(name))
        kinds = {part.kind for part in making.parts}
        if not (name.endswith(".weight") and _is_plain(module) and len(kinds) == 1):
            return False
        shapes = [part.shape for part in making.parts]
        return (
            kinds <= BLOCK_TYPES.keys()
            and all(len(shape) == 2 and shape[1] == making.shape[1] for shape in shapes)
            and sum(shape[0] for shape in shapes) == making.shape[0]
        )


def _is_of_shape(values: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether they are but for dimensions of one, or laid out as a vector."""
    if values.numel() != prod(shape):
        return False
    own = [size for size in values.shape if size != 1]
    return len(shape) == 1 or own == [size for size in shape if size != 1]


def _is_plain(module: nn.Module | None) -> bool:
    """Whether its weight is all that it is, and a scale of what it looks up."""
    return type(module) is nn.Linear or (module is not None and embed_scale(module) is not None)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
