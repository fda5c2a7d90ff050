"""Models whose weights lie in GGUF files, dequantised by transformers.

transformers leaves out what it finds no place for in a file, and believes its sizes: both are looked at
here, before it loads anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)

from engine.gguf.file import GgufHeader, StoredTensor, needing_gguf, read_header
from engine.gguf.tokenizer import end_token_ids
from engine.model.checkpoint import load_weights
from engine.request.errors import UnsupportedModelError

_F32, _F16, _BF16 = 0, 1, 30
_FLOATS = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
"""Types of tensors that are values, not blocks, by ggml's numbers."""
_ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what each frequency of the rotary embedding is divided by; transformers does not read
it."""


@contextmanager
def parsed_once() -> Iterator[None]:
    """Lets transformers parse a file once within it, not anew for its configuration and its weights, and
    make its table of names once, not for every module: that is two thirds of the time that loading takes,
    and transformers has no seam for it. Its progress is shown on terminals alone.

    Raises UnsupportedModelError where a package of the extra is missing.
    """
    with needing_gguf():
        # transformers asks for both, and names neither as a line can.
        gguf, _ = (import_module(name) for name in ("gguf", "accelerate"))
    progress = getattr(modeling_gguf_pytorch_utils, "tqdm")  # noqa: B009 - it is no export
    replaced = {
        (gguf, "GGUFReader"): cache(gguf.GGUFReader),
        (gguf, "get_tensor_name_map"): cache(gguf.get_tensor_name_map),
        (modeling_gguf_pytorch_utils, "tqdm"): partial(progress, disable=None),
    }
    kept = {place: getattr(*place) for place in replaced}
    try:
        for place, value in replaced.items():
            setattr(*place, value)
        yield
    finally:
        for place, value in kept.items():
            setattr(*place, value)


def read_config(path: Path) -> tuple[GgufHeader, Any]:
    """Returns a file's header and configuration. Raises UnsupportedModelError for what rules it out,
    whatever transformers raises for an architecture that it does not know."""
    header = read_header(path)
    _check_sizes(header)
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=str(path.absolute()))
    _check_rope(header, config)
    return header, config


def load_gguf(
    path: Path, header: GgufHeader, config: Any, dtype: torch.dtype | str
) -> PreTrainedModel:
    """Returns the causal LM of a file. ``dtype`` "auto": its values' own, bf16 where they are blocks.

    Raises UnsupportedModelError where the file's tensors are not those of its configuration, and as
    ``load_weights``.
    """
    with needing_gguf():
        # Of newer versions than everything else needs.
        from transformers.utils.quantization_config import GgufConfig

    _check_values(header, config)
    loaded = load_weights(
        str(path.parent),
        config,
        gguf_file=str(path.absolute()),
        quantization_config=GgufConfig(dequantize=True),
        dtype=stored_dtype(header) if dtype == "auto" else dtype,
    )
    _forget_quantization(loaded)
    _divide_frequencies(loaded, path, header)
    generation = loaded.generation_config or GenerationConfig()
    generation.eos_token_id = list(end_token_ids(header)) or None
    loaded.generation_config = generation
    return loaded


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
    num_layers = header.metadata.get(f"{header.architecture}.block_count")
    if num_layers is not None and layers != set(range(min(num_layers, len(layers) + 1))):
        raise UnsupportedModelError(
            f"its configuration says {num_layers} layers, and it has tensors of {len(layers)}"
        )
    num_tokens = len(header.metadata.get("tokenizer.ggml.tokens", ()))
    embedding = shapes.get("token_embd.weight")
    if embedding is not None and num_tokens > embedding[-1]:
        raise UnsupportedModelError(
            f"its tokenizer has {num_tokens} tokens, and its embedding {embedding[-1]}"
        )


def _check_rope(header: GgufHeader, config: Any) -> None:
    """Raises UnsupportedModelError where frequencies are scaled in a way that was not read."""
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    read = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind != "none" and read == "default":
        raise UnsupportedModelError(
            f"its rotary embedding is scaled ({kind}), which transformers does not read from GGUF files"
        )


def _check_values(header: GgufHeader, config: Any) -> None:
    """Raises UnsupportedModelError unless the file holds as many values as the model has that its
    configuration makes: transformers would drop the rest, or ask for memory for what is not there."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    left_out = {_ROPE_FACTORS} | ({"output.weight"} if config.tie_word_embeddings else set())
    held = sum(prod(tensor.shape) for tensor in header.tensors if tensor.name not in left_out)
    if held != wanted:
        raise UnsupportedModelError(
            f"its tensors hold {held} values, and a model of its configuration has {wanted}: "
            "transformers reads another model than the file describes"
        )


def _forget_quantization(model: Any) -> None:
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
        file.seek(tensor.start)
        return torch.frombuffer(bytearray(file.read(tensor.num_bytes)), dtype=torch.float32)
