"""Rotary embeddings as GGUF files describe them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.configuration import Said
from engine.weights.gguf.file import GgufHeader
from engine.weights.gguf.parameters import read_floats

_ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what each frequency of the rotary embedding is divided by."""
_PROPORTIONAL = "gemma4_text"
"""A type whose configuration says what turns."""


def rope(said: Said, usual: Any, head_dim: int) -> dict[str, Any]:
    """Returns ``rope_parameters``. ``usual``: those of the class, which may tell apart kinds of layers.
    Raises UnsupportedModelError for scalings that are not known."""
    width = said.count("rope.dimension_count")
    base = {
        "rope_theta": float(said.number("rope.freq_base") or 10000.0),
        "partial_rotary_factor": (width or head_dim) / head_dim,
    }
    scaled = base | _scaling(said)
    if "full_attention" not in (usual or {}):
        return scaled
    # A class with one base for both kinds of layers is of models whose files may say no other.
    bases = {kind: each["rope_theta"] for kind, each in usual.items()}
    is_one = bases["sliding_attention"] == bases["full_attention"]
    unsaid = base["rope_theta"] if is_one else bases["sliding_attention"]
    local = float(said.number("rope.freq_base_swa") or unsaid)
    sliding = base | {"rope_type": "default", "rope_theta": local}
    return {"full_attention": scaled, "sliding_attention": sliding}


def _scaling(said: Said) -> dict[str, Any]:
    if "rope_factors_long.weight" in said.tensors:
        return _long_rope(said)
    # Older files have another key, and what is scaled without a word is scaled linearly.
    factor = said.number("rope.scaling.factor") or said.number("rope.scale_linear")
    kind = said.value("rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn") or not factor:
        raise UnsupportedModelError(
            f"its rotary embedding is scaled ({kind}, by {factor}), which is not read"
        )
    found: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        found["original_max_position_embeddings"] = said.needed(
            "rope.scaling.original_context_length"
        )
        for name, key in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "yarn_attn_factor"),
        ):
            if (number := said.number(f"rope.scaling.{key}")) is not None:
                found[name] = float(number)
    return found


def _long_rope(said: Said) -> dict[str, Any]:
    original = said.needed("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "factor": said.needed("context_length") / original,
        "original_max_position_embeddings": original,
        "long_factor": said.floats("rope_factors_long.weight"),
        "short_factor": said.floats("rope_factors_short.weight"),
    }


def check_rotary(model: PreTrainedModel, header: GgufHeader) -> None:
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


def divide_frequencies(model: PreTrainedModel, header: GgufHeader) -> None:
    """Divides the rotary embedding's frequencies by what the file says for long contexts (Llama 3.1 and
    later). Raises UnsupportedModelError where it does not fit."""
    if _ROPE_FACTORS not in header.tensors or model.config.model_type == _PROPORTIONAL:
        return
    factors = read_floats(header, _ROPE_FACTORS)
    rotary: list[Any] = [each for each in model.modules() if hasattr(each, "inv_freq")]
    if not rotary or any(each.inv_freq.shape != factors.shape for each in rotary):
        raise UnsupportedModelError(f"its {_ROPE_FACTORS} does not fit the rotary embedding")
    for each in rotary:
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(each, name, None)
            if frequencies is not None:
                frequencies.copy_(frequencies / factors)
