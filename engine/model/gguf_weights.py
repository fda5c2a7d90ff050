"""Models whose weights lie in GGUF files, in the file's own bits or dequantised.

transformers says which configuration a file's metadata means, which of a model's parameters each tensor
is, and what llama.cpp's conversion did to it. The file is read here, tensor by tensor: transformers
would hold it in floats, leave out what it finds no place for, and believe its sizes.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from engine.gguf.file import GgufHeader, StoredTensor, needing_gguf, read_header, write_outline
from engine.gguf.tokenizer import end_token_ids
from engine.model.checkpoint import load_config, load_weights, not_finite
from engine.model.layers import embed_scale
from engine.model.stored.gguf import BLOCK_TYPES, GgufEmbedding, GgufWeight
from engine.model.stored.places import Place, StoredConfig
from engine.request.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_F32, _F16, _BF16 = 0, 1, 30
_FLOATS = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
"""Types of tensors that are values, not blocks, by ggml's numbers."""
_Order = np.ndarray[Any, Any] | slice
_MOST_QUOTED = 40
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")} | {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of general.sampling, and what a generation config calls them."""
_ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what each frequency of the rotary embedding is divided by; transformers does not read
it."""


def read_config(path: Path) -> tuple[GgufHeader, Any]:
    """Returns a file's header and configuration. Raises UnsupportedModelError for what rules it out,
    whatever transformers raises for an architecture that it does not know."""
    header = read_header(path)
    _check_sizes(header)
    config = _described(path, header)
    _check_rope(header, config)
    return header, config


def load_gguf(
    path: Path,
    header: GgufHeader,
    config: Any,
    dtype: torch.dtype | str,
    packed: bool = True,
) -> PreTrainedModel:
    """Returns the causal LM of a file. ``dtype`` "auto": its values' own, bf16 where they are blocks.
    ``packed``: linear layers and embeddings of the types in ``BLOCK_TYPES`` are ``StoredWeight``s, which
    hold the file's blocks; else everything is dequantised, and wherever transformers alone knows what a
    tensor becomes.

    Raises UnsupportedModelError where the file's tensors are not those of its configuration, and as
    ``load_weights``.
    """
    wanted = stored_dtype(header) if dtype == "auto" else dtype
    assert isinstance(wanted, torch.dtype), "other names are resolved by the loader"
    skeleton = _skeleton(header, config)
    if _is_converted(header):
        loaded = _load_converted(path, config, wanted)
    else:
        reading = _Reading(header, config, skeleton, wanted, packed)
        with path.open("rb") as file:
            tensors = reading.tensors(file)
        places = StoredConfig(reading.placing())
        loaded = load_weights(
            None,
            config,
            type(skeleton),
            state_dict=tensors,
            quantization_config=places,
            dtype=wanted,
        )
    forget_quantization(loaded)
    loaded.config.name_or_path = str(path.parent)
    _check_blocks(loaded)
    _divide_frequencies(loaded, path, header)
    generation = loaded.generation_config or GenerationConfig()
    generation.eos_token_id = list(end_token_ids(header)) or None
    for key, name in _SAMPLING.items():
        value = header.metadata.get(f"general.sampling.{key}")
        # The digits that a float32 has: 0.6, not 0.6000000238.
        setattr(generation, name, float(f"{value:.7g}") if isinstance(value, float) else value)
    loaded.generation_config = generation
    return loaded


def _is_converted(header: GgufHeader) -> bool:
    """Whether transformers has rules for an architecture that its loader applies, not names and a
    processor."""
    with needing_gguf():
        # Of newer versions than everything else needs.
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    return header.architecture in GGUF_ARCHS


def _load_converted(path: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with needing_gguf():
        import_module("accelerate")  # transformers asks for it here alone
        from transformers.utils.quantization_config import GgufConfig
    return load_weights(
        str(path.parent),
        config,
        gguf_file=str(path.absolute()),
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
    )


class _Reading:
    """What each tensor of a file becomes. ``skeleton``: the model, on the device "meta"."""

    def __init__(
        self,
        header: GgufHeader,
        config: Any,
        skeleton: PreTrainedModel,
        dtype: torch.dtype,
        packed: bool,
    ) -> None:
        self._header, self._dtype = header, dtype
        kind: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor = kind(config=config.to_dict())
        self._names = get_gguf_hf_weights_map(_Outermost(skeleton), self._processor)
        self._modules = dict(skeleton.named_modules(remove_duplicate=False))
        self._read: dict[str, Any] = {"tensors": {}}
        self._num_dequantised: Counter[int] = Counter()
        self._kinds: dict[str, int] = {}
        """The types of modules that keep their blocks, by names of modules."""
        self._packed: dict[str, tuple[_Order, list[str]]] = {}
        """By names of tensors: which row of the file each row of a module is, and the parameters that
        keep the blocks."""
        if packed:
            self._plan(getattr(skeleton, "all_tied_weights_keys", None) or {})

    def placing(self) -> Place:
        """Returns what makes a place for the blocks of a module, if it keeps them. It holds no tensors:
        transformers copies configurations, with all that they refer to, several times."""
        kinds, dtype = self._kinds, self._dtype

        def place(name: str, module: nn.Module) -> nn.Module | None:
            kind = kinds.get(name)
            if kind is None:
                return None
            if isinstance(module, nn.Embedding):
                scale = embed_scale(module)
                assert scale is not None
                return GgufEmbedding(kind, module.num_embeddings, module.embedding_dim, scale)
            assert isinstance(module, nn.Linear)
            has_bias = module.bias is not None
            return GgufWeight(kind, module.in_features, module.out_features, has_bias, dtype)

        return place

    def tensors(self, file: BinaryIO) -> dict[str, torch.Tensor]:
        """Returns the model's parameters by name: blocks as they are, everything else in its type."""
        found: dict[str, torch.Tensor] = self._read["tensors"]
        for tensor in self._header.tensors:
            data = _bytes_of(tensor, file)
            order, names = self._packed.get(tensor.name, (None, []))
            if order is not None:
                rows = data.reshape(tensor.shape[1], -1)
                found |= dict.fromkeys(names, torch.from_numpy(rows[order]))
            if self._names.get(tensor.name) not in names:
                self._dequantise(tensor, data)
        if self._num_dequantised:
            logger.info("dequantised: %s", _counted(self._num_dequantised))
        return found

    def _plan(self, tied: Mapping[str, str]) -> None:
        """Decides which modules keep their blocks. ``tied``: parameters that are others, by names. Where
        one of those that share blocks does not take them, those that do get them apart."""
        held = {each.name for each in self._header.tensors}
        apart = {name for stored, name in self._names.items() if stored in held}
        for tensor in self._header.tensors:
            name = self._names.get(tensor.name, "")
            if tensor.kind not in BLOCK_TYPES or len(tensor.shape) != 2:
                continue
            order = self._row_order(tensor)
            if order is None:
                continue
            sharing = [
                each for each, source in tied.items() if source == name and each not in apart
            ]
            taking = [each for each in (name, *sharing) if self._takes_blocks(each, tensor)]
            has_all = len(taking) == 1 + len(sharing)
            names = taking if has_all else [each for each in taking if each != name]
            self._kinds |= {_module_of(each): tensor.kind for each in names}
            if names:
                self._packed[tensor.name] = order, [name] if has_all else names

    def _takes_blocks(self, name: str, tensor: StoredTensor) -> bool:
        module = self._modules.get(_module_of(name))
        return (
            name.endswith(".weight")
            and _is_plain(module)
            and tuple(module.weight.shape) == tensor.shape[::-1]  # type: ignore[union-attr]
        )

    def _row_order(self, tensor: StoredTensor) -> _Order | None:
        """Returns which row of the file each row of a matrix is, None where it is made in another way. It
        is found out: transformers is given rows that hold their own numbers."""
        rows = np.arange(tensor.shape[-1])[:, None]
        others: dict[str, Any] = {"tensors": {}}
        try:
            found = self._processor.process(
                weights=rows,
                name=tensor.name,
                tensor_key_mapping=self._names,
                parsed_parameters=others,
            )
        except (ValueError, IndexError, KeyError):  # it takes matrices of other sizes
            return None
        order = found.weights
        if found.name != tensor.name or others["tensors"] or order.shape != rows.shape:
            return None
        if np.array_equal(order, rows):
            return slice(None)
        return order[:, 0] if np.array_equal(np.sort(order, 0), rows) else None

    def _dequantise(self, tensor: StoredTensor, data: np.ndarray[Any, Any]) -> None:
        """Makes a tensor the parameter that transformers makes of it, or its part of one."""
        if tensor.kind not in _FLOATS:
            self._num_dequantised[tensor.kind] += 1
        found = self._processor.process(
            weights=_values(tensor, data),
            name=tensor.name,
            tensor_key_mapping=self._names,
            parsed_parameters=self._read,
        )
        made = self._read["tensors"]
        if found.name in self._names:
            made[self._names[found.name]] = torch.from_numpy(np.ascontiguousarray(found.weights))
        for name, values in made.items():
            if values.is_floating_point() and values.dtype != self._dtype:
                made[name] = values.to(self._dtype)


class _Outermost:
    """A model without the modules within its decoder: transformers looks for names in each module anew,
    which takes seconds, and finds those of the model and of its decoder."""

    def __init__(self, model: Any, depth: int = 1) -> None:
        self._model, self._depth = model, depth
        self.config = getattr(model, "config", None)

    def state_dict(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._model.state_dict()
        return found

    def named_children(self) -> Iterator[tuple[str, _Outermost]]:
        for name, child in self._model.named_children() if self._depth else ():
            yield name, _Outermost(child, self._depth - 1)


def _is_plain(module: nn.Module | None) -> bool:
    """Whether its weight is all that it is, and a scale of what it looks up."""
    return type(module) is nn.Linear or (module is not None and embed_scale(module) is not None)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _bytes_of(tensor: StoredTensor, file: BinaryIO) -> np.ndarray[Any, Any]:
    data = np.empty(tensor.num_bytes, dtype=np.uint8)
    file.seek(tensor.start)
    if file.readinto(data) != tensor.num_bytes:  # type: ignore[attr-defined]  # BinaryIO lacks it
        raise UnsupportedModelError(
            f"the file ends in tensor {tensor.name!r}: it was cut meanwhile"
        )
    return data


def _values(tensor: StoredTensor, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a tensor in float32, the fastest moving dimension last."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = data.reshape(prod(tensor.shape[1:]), -1)
    kind = GGMLQuantizationType(tensor.kind)
    try:
        with np.errstate(
            all="ignore"
        ):  # scales that are no numbers are named with all others, later
            values: np.ndarray[Any, Any] = dequantize(rows, kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} is of the type {kind.name}, which is not read"
        ) from error
    return values.reshape(tensor.shape[::-1])


def _counted(kinds: Counter[int]) -> str:
    """Says how many tensors there are of each type."""
    from gguf.constants import GGMLQuantizationType

    named = ((GGMLQuantizationType(kind).name, count) for kind, count in kinds.most_common())
    return ", ".join(f"{count} tensors of type {name}" for name, count in named)


def _described(path: Path, header: GgufHeader) -> Any:
    """Returns the configuration that transformers makes of a file's metadata."""
    with needing_gguf():
        import_module("gguf")  # transformers asks for it, and does not name it as a line can
    num_tokens = _said_count(header, "vocab_size") or _num_tokens(header)
    options: dict[str, Any] = {"vocab_size": num_tokens} if num_tokens else {}
    if _is_converted(header):
        return load_config(str(path.parent), gguf_file=str(path.absolute()))
    with TemporaryDirectory() as folder:
        outline = Path(folder) / "outline.gguf"
        write_outline(path, header, outline)
        return load_config(folder, gguf_file=str(outline), name_or_path=str(path.parent), **options)


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """Returns the type in which to compute with a file's weights. Norms are float32 whatever the others
    are."""
    kinds = {tensor.kind for tensor in header.tensors}
    if not kinds <= set(_FLOATS):
        return torch.bfloat16
    return _FLOATS[max(kinds)]


def _check_sizes(header: GgufHeader) -> None:
    """Raises UnsupportedModelError where a file says other sizes than its tensors have. Layers are made
    one by one: so many have to be there."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    layers = {int(found[1]) for name in shapes if (found := re.match(r"blk\.(\d+)\.", name))}
    num_layers = _said_count(header, "block_count")
    if num_layers is not None and layers != set(range(min(num_layers, len(layers) + 1))):
        raise UnsupportedModelError(
            f"its configuration says {num_layers} layers, and it has tensors of {len(layers)}"
        )
    num_tokens = _num_tokens(header)
    embedding = shapes.get("token_embd.weight")
    if embedding is not None and num_tokens > embedding[-1]:
        raise UnsupportedModelError(
            f"its tokenizer has {num_tokens} tokens, and its embedding {embedding[-1]}"
        )


def _said_count(header: GgufHeader, name: str) -> int | None:
    """Returns a number that the architecture has, if it is said. Raises UnsupportedModelError where it is
    none of things."""
    key = f"{header.architecture}.{name}"
    number = header.metadata.get(key)
    if number is not None and (not isinstance(number, int) or number < 0):
        raise UnsupportedModelError(f"its {key} is {str(number)[:_MOST_QUOTED]!r}")
    return number


def _num_tokens(header: GgufHeader) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _check_rope(header: GgufHeader, config: Any) -> None:
    """Raises UnsupportedModelError where frequencies are scaled in a way that was not read."""
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    read = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind != "none" and read == "default":
        raise UnsupportedModelError(
            f"its rotary embedding is scaled ({kind}), which transformers does not read from GGUF files"
        )


def _skeleton(header: GgufHeader, config: Any) -> PreTrainedModel:
    """Returns the model that the configuration makes, on the device "meta". Raises UnsupportedModelError
    unless the file holds as many values: transformers would drop the rest, or ask for memory for what is
    not there."""
    with torch.device("meta"):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    left_out = {_ROPE_FACTORS} | ({"output.weight"} if config.tie_word_embeddings else set())
    held = sum(prod(tensor.shape) for tensor in header.tensors if tensor.name not in left_out)
    if held != wanted:
        raise UnsupportedModelError(
            f"its tensors hold {held} values, and a model of its configuration has {wanted}: "
            "transformers reads another model than the file describes"
        )
    return skeleton


def _check_blocks(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for blocks with scales that are no finite numbers."""
    places = (
        (f"{name}.weight", each.block_scales())
        for name, each in model.named_modules()
        if isinstance(each, GgufWeight | GgufEmbedding)
    )
    faults = not_finite(places)
    if faults:
        raise UnsupportedModelError(faults[0])


def forget_quantization(model: Any) -> None:
    """Makes what was dequantised a model like any other."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False


def _divide_frequencies(model: PreTrainedModel, path: Path, header: GgufHeader) -> None:
    """Divides the rotary embedding's frequencies by what the file says for long contexts (Llama 3.1 and
    later). Raises UnsupportedModelError where it does not fit."""
    found = next((each for each in header.tensors if each.name == _ROPE_FACTORS), None)
    if found is None:
        return
    factors = _read_floats(path, found)
    rotary: list[Any] = [each for each in model.modules() if hasattr(each, "inv_freq")]
    if not rotary or any(each.inv_freq.shape != factors.shape for each in rotary):
        raise UnsupportedModelError(f"its {_ROPE_FACTORS} does not fit the rotary embedding")
    for each in rotary:
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(each, name, None)
            if frequencies is not None:
                frequencies.copy_(frequencies / factors)


def _read_floats(path: Path, tensor: StoredTensor) -> torch.Tensor:
    if tensor.kind != _F32:
        raise UnsupportedModelError(f"{tensor.name} is not stored in float32")
    with path.open("rb") as file:
        return torch.from_numpy(_bytes_of(tensor, file).view(np.float32))
