"""Models whose weights lie in GGUF files, in the file's own bits or dequantised.

The file's metadata says which configuration of transformers it means (``configuration``). Tensors are
read one by one (``reading``); each has to be some parameter's, and each parameter has to be there
(``parameters``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.request.errors import UnsupportedModelError
from engine.weights.checkpoint import load_weights, not_finite
from engine.weights.experts import GgufExperts
from engine.weights.gguf.architecture import Architecture
from engine.weights.gguf.architectures import ARCHITECTURES
from engine.weights.gguf.blocks import GgufEmbedding, GgufWeight
from engine.weights.gguf.configuration import Said, described
from engine.weights.gguf.file import GgufHeader, read_header
from engine.weights.gguf.parameters import read_floats
from engine.weights.gguf.reading import FLOATS, Reading
from engine.weights.gguf.rotary import check_rotary, divide_frequencies, rope
from engine.weights.gguf.tokenizer import end_token_ids
from engine.weights.places import StoredConfig

_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")} | {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of general.sampling, and what a generation config calls them."""


def read_config(path: Path) -> tuple[GgufHeader, Any]:
    """Returns a file's header and configuration. Raises UnsupportedModelError for what rules it out,
    whatever transformers raises for sizes that do not fit together."""
    header = read_header(path)
    architecture = _architecture(header)
    said = Said(header, lambda name: read_floats(header, name).tolist())
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
            "that are, docs/extend.md how to add one"
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
    check_rotary(skeleton, header)
    reading = Reading(header, config, _architecture(header).undo, skeleton, wanted, packed)
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
    divide_frequencies(loaded, header)
    generation = loaded.generation_config or GenerationConfig()
    generation.eos_token_id = list(end_token_ids(header)) or None
    for key, name in _SAMPLING.items():
        value = header.metadata.get(f"general.sampling.{key}")
        # The digits that a float32 has: 0.6, not 0.6000000238.
        setattr(generation, name, float(f"{value:.7g}") if isinstance(value, float) else value)
    loaded.generation_config = generation
    return loaded


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """Returns the type in which to compute with a file's weights. Norms are float32 whatever the others
    are."""
    kinds = {tensor.kind for tensor in header.tensors.values()}
    if not kinds <= FLOATS.keys():
        return torch.bfloat16
    return next(dtype for kind, dtype in FLOATS.items() if kind in kinds)


def _check_blocks(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for blocks with scales that are no finite numbers."""
    places = []
    for name, each in model.named_modules():
        if isinstance(each, GgufWeight | GgufEmbedding):
            places.append((f"{name}.weight", each.block_scales()))
        elif isinstance(each, GgufExperts):
            places += [(f"{name}.{own}", scales) for own, scales in each.block_scales()]
    if faults := not_finite(places):
        raise UnsupportedModelError(faults[0])
