"""Models whose weights lie in GGUF files, in the file's own bits or dequantised.

The file's metadata says which configuration of transformers it means, ``gguf``'s table which tensor each
parameter of that model is, and the modules beside this one what llama.cpp's conversion did to it. Tensors
are read one by one; each has to be some parameter's, and each parameter has to be there.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.request.errors import UnsupportedModelError
from engine.weights.checkpoint import load_weights, not_finite
from engine.weights.experts import GgufExperts, expert_sizes
from engine.weights.gguf.architecture import Architecture
from engine.weights.gguf.architectures import ARCHITECTURES
from engine.weights.gguf.blocks import BLOCK_TYPES, GgufEmbedding, GgufWeight
from engine.weights.gguf.configuration import Said, described, rope
from engine.weights.gguf.conversion import DECAY, SOURCES, Array, Undo
from engine.weights.gguf.file import GgufHeader, needing_gguf, read_header
from engine.weights.gguf.tokenizer import end_token_ids
from engine.weights.index import StoredTensor, TensorIndex, named
from engine.weights.layer import Place, embed_scale
from engine.weights.places import StoredConfig

logger = logging.getLogger(__name__)

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types of tensors that are values, not blocks: the first that a file has is its own."""
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")} | {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of general.sampling, and what a generation config calls them."""
_ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what each frequency of the rotary embedding is divided by."""
_PROPORTIONAL = "gemma4_text"
"""A type whose configuration says what turns."""
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_STORED_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_SHARED = re.compile(r"attn_[kv](_norm)?\.weight")
_IN_METADATA = re.compile(r"layers\.(\d+)\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)$")


def read_config(path: Path) -> tuple[GgufHeader, Any]:
    """Returns a file's header and configuration. Raises UnsupportedModelError for what rules it out,
    whatever transformers raises for sizes that do not fit together."""
    header = read_header(path)
    architecture = _architecture(header)
    said = Said(header, lambda name: _read_floats(header, name).tolist())
    says = {**architecture.says(said)}
    model_type = says.pop("model_type", architecture.model_type)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"architecture {header.architecture!r} is of the type {model_type!r}, which transformers "
            "does not have"
        )
    kind: Any = CONFIG_MAPPING[model_type]
    more = says.pop("rope_parameters", {})
    values = described(said, kind, says)
    usual = kind()
    if hasattr(usual, "rope_parameters"):
        head_dim = values.get("qk_rope_head_dim", said.head_dim)
        values["rope_parameters"] = rope(said, usual.rope_parameters, head_dim)
        parameters = values["rope_parameters"]
        parameters.get("full_attention", parameters).update(more)
    config = kind(**values)
    config.name_or_path = str(path.parent)
    return header, config


def _architecture(header: GgufHeader) -> Architecture:
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"GGUF files of architecture {header.architecture!r} are not read; docs/gguf.md has those "
            "that are"
        )
    return found


def load_gguf(
    path: Path,
    header: GgufHeader,
    config: Any,
    dtype: torch.dtype | str,
    packed: bool = True,
) -> PreTrainedModel:
    """Returns the causal LM of a file. ``dtype`` "auto": its values' own, bf16 where they are blocks.
    ``packed``: linear layers, embeddings and experts of the types in ``BLOCK_TYPES`` are places that hold
    the file's blocks; else everything is dequantised.

    Raises UnsupportedModelError where the file's tensors are not those of its configuration, and as
    ``load_weights``.
    """
    wanted = stored_dtype(header) if dtype == "auto" else dtype
    assert isinstance(wanted, torch.dtype), "other names are resolved by the loader"
    with torch.device("meta"):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    _check_rotary(skeleton, header)
    reading = _Reading(header, config, skeleton, wanted, packed)
    loaded = load_weights(
        None,
        config,
        type(skeleton),
        state_dict=reading.tensors(),
        quantization_config=StoredConfig(reading.placing()),
        dtype=wanted,
    )
    loaded.config.name_or_path = str(path.parent)
    _check_blocks(loaded)
    _divide_frequencies(loaded, header)
    generation = loaded.generation_config or GenerationConfig()
    generation.eos_token_id = list(end_token_ids(header)) or None
    for key, name in _SAMPLING.items():
        value = header.metadata.get(f"general.sampling.{key}")
        # The digits that a float32 has: 0.6, not 0.6000000238.
        setattr(generation, name, float(f"{value:.7g}") if isinstance(value, float) else value)
    loaded.generation_config = generation
    return loaded


class _Making(NamedTuple):
    """How a parameter is made: its tensors, and how they are restored. ``at``: its index in a stack of
    matrices."""

    parts: tuple[StoredTensor, ...]
    undo: tuple[Undo, ...]
    shape: tuple[int, ...]
    at: int | None

    @property
    def keeps_rows(self) -> bool:
        """Whether it has the parts' rows, in any order, and columns in another at most."""
        return self.at is None and not any(each.values or each.join for each in self.undo)

    def features(self, config: Any) -> torch.Tensor | None:
        """Returns which feature each of the file's columns is for, None where they are in order."""
        columns = next((each.columns for each in self.undo if each.columns), None)
        if columns is None:
            return None
        return torch.from_numpy(np.argsort(columns(config, self.shape[1])))

    def joined(self, config: Any, parts: Sequence[Array]) -> Array:
        """Returns the parameter of its parts, as they are in the file."""
        join = next((each.join for each in self.undo if each.join), None)
        if join is not None:
            found = join(config, parts)
        elif self.at is not None:
            found = parts[0][self.at]
        else:
            found = self.stacked(config, [_without_ones(each) for each in parts])
        for each in self.undo:
            if each.columns is not None:
                found = found[:, each.columns(config, found.shape[1])]
            if each.values is not None:
                found = each.values(found)
        return found

    def stacked(self, config: Any, parts: Sequence[Array]) -> Array:
        """Lays rows one below the other, for each expert where there are such, in the model's order."""
        found = (
            parts[0] if len(parts) == 1 else np.concatenate(parts, axis=max(0, parts[0].ndim - 2))
        )
        for each in self.undo:
            if each.rows is not None:
                found = found[each.rows(config, len(found))]
        return found


def _without_ones(values: Array) -> Array:
    """Convolutions have dimensions of one channel between their own in some files."""
    return values.squeeze() if values.ndim > 3 else values


class _Names:
    """Which tensors of a file a parameter is made of."""

    def __init__(self, header: GgufHeader, num_layers: int) -> None:
        with needing_gguf():
            from gguf import MODEL_ARCH_NAMES, TensorNameMap

        class Table(TensorNameMap):
            # The one of the package takes over the rows of whatever architecture is asked for.
            block_mappings_cfg = dict(TensorNameMap.block_mappings_cfg)

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        if header.architecture not in numbers:
            raise UnsupportedModelError(
                "the installed package gguf has no names of tensors for architecture "
                f"{header.architecture!r}"
            )
        self._table = Table(numbers[header.architecture], num_layers)
        self._tensors = header.tensors

    def of(self, name: str) -> tuple[tuple[StoredTensor, ...], int | None] | None:
        """Returns the tensors, and which of a stack it is; None where none are in the file."""
        for names, at in self._candidates(name):
            found = tuple(self._tensors[each] for each in names if each in self._tensors)
            if len(found) == len(names):
                return found, at
        return None

    def _candidates(self, name: str) -> Iterator[tuple[list[str], int | None]]:
        layer = _LAYER.search(name)
        # Some types keep their layers in a model that had another name.
        for known in (name, re.sub(r"^model\.", "backbone.", name)):
            stored = self._table.get_name(known, try_suffixes=(".weight", ".bias"))
            if stored is not None:
                yield from (([f"{stored}{end}"], None) for end in ("", ".weight", ".bias"))
        for pattern, several in SOURCES:
            if (found := re.search(pattern, name)) is not None:
                begin = "" if layer is None else f"blk.{layer[1]}."
                at = found.groupdict().get("at")
                yield [begin + each for each in several.split()], None if at is None else int(at)


class _Reading:
    """Maps each tensor of a file to its destination. ``skeleton``: the model, on the device "meta"."""

    def __init__(
        self,
        header: GgufHeader,
        config: Any,
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
        self._said: dict[str, torch.Tensor] = {}
        """Parameters that the metadata says."""
        tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
        self._makings = self._plan(skeleton.state_dict(), tied)
        if packed:
            self._pack(tied)
            for name, module in self._modules.items():
                self._pack_experts(name, module)

    def _plan(
        self, wanted: Mapping[str, torch.Tensor], tied: Mapping[str, str]
    ) -> dict[str, _Making]:
        names = _Names(self._header, self._config.num_hidden_layers)
        undo = (*_architecture(self._header).undo, DECAY)
        found, missing = {}, []
        for name, parameter in wanted.items():
            sources = names.of(name)
            if sources is not None:
                own = tuple(
                    each
                    for each in undo
                    if re.search(each.pattern, name) and each.num_parts in (0, len(sources[0]))
                )
                found[name] = _Making(sources[0], own, tuple(parameter.shape), sources[1])
            elif (value := self._in_metadata(name)) is not None:
                self._said[name] = torch.tensor(value).reshape(parameter.shape).to(self._dtype)
            elif name not in tied:
                missing.append(name)
        used = {part.name for making in found.values() for part in making.parts}
        left = self._header.tensors.keys() - used
        _refuse("tensors that the configuration asks for are missing", missing)
        _refuse("tensors are no parameters of the model", filter(self._is_needed, left))
        return found

    def _in_metadata(self, name: str) -> float | None:
        """Returns a parameter of an activation, which files have among their values."""
        found = _IN_METADATA.search(name)
        values = found and self._header.metadata.get(f"xielu.{found[2]}")
        if not found or not isinstance(values, list) or int(found[1]) >= len(values):
            return None
        return float(values[int(found[1])])

    def _is_needed(self, name: str) -> bool:
        """Whether the model needs a tensor. It does not need rotary embedding factors,
        multi-token-prediction layers, or keys and values of layers that reuse another layer's."""
        found = _STORED_LAYER.match(name)
        if found is None:
            return not name.startswith(("rope_freqs.", "rope_factors_"))
        num_layers = self._config.num_hidden_layers
        first_shared = num_layers - (getattr(self._config, "num_kv_shared_layers", None) or 0)
        layer = int(found[1])
        is_shared = layer >= first_shared and _SHARED.fullmatch(found[2])
        return not (layer >= num_layers or is_shared or found[2].startswith("rope_f"))

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
            data = [_bytes_of(part) for part in making.parts]
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
        _refuse("tensors have other shapes than the configuration says", wrong)
        if self._num_dequantised:
            counted = self._num_dequantised.most_common()
            said = ", ".join(f"{count} tensors of type {kind}" for kind, count in counted)
            logger.info("dequantised: %s", said)
        return found

    def _values(self, making: _Making, data: Sequence[Array]) -> torch.Tensor:
        for part in making.parts:
            if part.kind not in _FLOATS:
                self._num_dequantised[part.kind] += 1
        parts = [_values(part, each) for part, each in zip(making.parts, data, strict=True)]
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
            data, shape = _bytes_of(part), part.shape[:-1]
            is_packed = part.kind in BLOCK_TYPES
            read.append(data.reshape(*shape, -1) if is_packed else _values(part, data))
        whole = torch.from_numpy(read[0] if len(read) == 1 else np.concatenate(read, axis=1))
        return whole if whole.dtype == torch.uint8 else whole.to(self._dtype)

    def _takes_blocks(self, name: str, making: _Making) -> bool:
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


def _refuse(fault: str, names: Iterable[str]) -> None:
    """Raises UnsupportedModelError if there are any."""
    several = sorted(names)
    if several:
        raise UnsupportedModelError(f"{len(several)} {fault}: {named(several)}")


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


def _bytes_of(tensor: StoredTensor) -> Array:
    data: Array = np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.start)
    if len(data) != tensor.num_bytes:
        raise UnsupportedModelError(
            f"the file ends in tensor {tensor.name!r}: it was cut meanwhile"
        )
    return data


def _values(tensor: StoredTensor, data: Array) -> Array:
    """Returns a tensor in float32, the fastest moving dimension last."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = data.reshape(prod(tensor.shape[:-1]), -1)
    kind = GGMLQuantizationType[tensor.kind]
    try:
        # Scales that are no numbers are named with all others, later.
        with np.errstate(all="ignore"):
            values: Array = dequantize(rows, kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} is of the type {tensor.kind}, which is not read"
        ) from error
    return values.reshape(tensor.shape)


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """Returns the type in which to compute with a file's weights. Norms are float32 whatever the others
    are."""
    kinds = {tensor.kind for tensor in header.tensors.values()}
    if not kinds <= _FLOATS.keys():
        return torch.bfloat16
    return next(dtype for kind, dtype in _FLOATS.items() if kind in kinds)


def _check_rotary(model: PreTrainedModel, header: GgufHeader) -> None:
    """Raises UnsupportedModelError where the file says that other dimensions turn than the model's do."""
    width = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    widths = {
        2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")
    }
    if isinstance(width, int) and widths and width not in widths:
        raise UnsupportedModelError(
            f"its rotary embedding turns {width} dimensions, and that of {model.config.model_type} "
            f"{', '.join(map(str, sorted(widths)))}"
        )


def _check_blocks(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for blocks with scales that are no finite numbers."""
    places = []
    for name, each in model.named_modules():
        if isinstance(each, GgufWeight | GgufEmbedding):
            places.append((f"{name}.weight", each.block_scales()))
        elif isinstance(each, GgufExperts):
            places += [(f"{name}.{own}", scales) for own, scales in each.block_scales()]
    faults = not_finite(places)
    if faults:
        raise UnsupportedModelError(faults[0])


def _divide_frequencies(model: PreTrainedModel, header: GgufHeader) -> None:
    """Divides the rotary embedding's frequencies by what the file says for long contexts (Llama 3.1 and
    later). Raises UnsupportedModelError where it does not fit."""
    if _ROPE_FACTORS not in header.tensors or model.config.model_type == _PROPORTIONAL:
        return
    factors = _read_floats(header, _ROPE_FACTORS)
    rotary: list[Any] = [each for each in model.modules() if hasattr(each, "inv_freq")]
    if not rotary or any(each.inv_freq.shape != factors.shape for each in rotary):
        raise UnsupportedModelError(f"its {_ROPE_FACTORS} does not fit the rotary embedding")
    for each in rotary:
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(each, name, None)
            if frequencies is not None:
                frequencies.copy_(frequencies / factors)


def _read_floats(header: GgufHeader, name: str) -> torch.Tensor:
    """Returns a small tensor of the file. Raises UnsupportedModelError where it has none."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.kind != "F32":
        raise UnsupportedModelError(f"{name} is not stored in float32")
    return torch.from_numpy(_bytes_of(tensor).view(np.float32))
