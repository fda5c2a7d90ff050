"""Models whose weights lie in GGUF files, dequantised by transformers.

transformers leaves out what it finds no place for in a file, and believes its sizes: both is looked at
here before it loads anything.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils.quantization_config import GgufConfig

from engine.errors import UnsupportedModelError
from engine.gguf_file import GgufHeader, needing_gguf, read_header
from engine.gguf_tokenizer import end_token_ids
from engine.model.checkpoint import load_weights

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are values, not blocks, by ggml's numbers."""


def read_config(path: Path) -> tuple[GgufHeader, Any]:
    """A file's header and configuration. Raises UnsupportedModelError for what rules it out, whatever
    transformers raises for an architecture that it does not know."""
    with needing_gguf():
        # transformers asks for both, and names neither as a line can.
        for package in ("gguf", "accelerate"):
            import_module(package)
    header = read_header(path)
    _check_sizes(header)
    return header, AutoConfig.from_pretrained(str(path.parent), gguf_file=str(path.absolute()))


def load_gguf(
    path: Path, header: GgufHeader, config: Any, dtype: Any, **options: Any
) -> PreTrainedModel:
    """The causal LM of a file. ``dtype`` "auto": its values' own, bf16 where they are blocks.
    Raises as ``load_weights``."""
    wanted = stored_dtype(header) if dtype == "auto" else dtype
    loaded = load_weights(
        str(path.parent),
        config,
        gguf_file=str(path.absolute()),
        quantization_config=GgufConfig(dequantize=True),
        dtype=wanted,
        **options,
    )
    _forget_quantization(loaded)
    generation = loaded.generation_config or GenerationConfig()
    generation.eos_token_id = list(end_token_ids(header)) or None
    loaded.generation_config = generation
    return loaded


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """The type in which to compute with a file's weights: norms are stored in float32 beside whatever the
    others are."""
    kinds = {tensor.kind for tensor in header.tensors}
    if not kinds <= set(_FLOATS):
        return torch.bfloat16
    halves = kinds & {1, 30}
    return _FLOATS[max(halves)] if halves else torch.float32


def _check_sizes(header: GgufHeader) -> None:
    """Raises UnsupportedModelError where configuration and tensors do not belong together: a model of the
    configuration's sizes is made before any tensor is looked at."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    layers = {int(found[1]) for name in shapes if (found := re.match(r"blk\.(\d+)\.", name))}
    said = header.metadata.get(f"{header.architecture}.block_count")
    if said != len(layers) or (layers and max(layers) >= len(layers)):
        raise UnsupportedModelError(
            f"its configuration says {said} layers, and its tensors are of {len(layers)}"
        )
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise UnsupportedModelError("it holds no token_embd.weight: it is not a language model")
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    if width != embedding[0]:
        raise UnsupportedModelError(
            f"its configuration says {width} values per token, and its embedding has {embedding[0]}"
        )
    num_tokens = len(header.metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens > embedding[1]:
        raise UnsupportedModelError(
            f"its tokenizer has {num_tokens} tokens, and its embedding {embedding[1]}"
        )


def _forget_quantization(model: Any) -> None:
    """What was dequantised is a model like any other."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
