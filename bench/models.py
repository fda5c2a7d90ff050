"""The models to measure, each loaded twice: ours gets another attention and packed weights, so
transformers keeps a copy of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bench.scaled_model import build_scaled_copy
from engine.build import build_engine_for, with_fastest_weights
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.loader import bundled_path, load_model, load_tokenizer, prepare_model
from engine.names import BUNDLED_MODEL
from engine.process.threaded import AsyncEngine
from engine.request.info import EngineInfo

BUNDLED = BUNDLED_MODEL
SCALED = "scaled"
LARGE = "large"
OWN = (BUNDLED, SCALED, LARGE)
"""The bundled model and its copies, for which there is a draft model."""
_LARGE_WIDTH = 16
_LARGE_PARAMETERS = 8_000_000_000


@dataclass(frozen=True, slots=True)
class BenchModel:
    """``what`` says in a sentence what the model is; every table shows it. ``theirs`` is None where
    transformers is not measured."""

    name: str
    what: str
    num_layers: int
    tokenizer: PreTrainedTokenizerBase
    core: EngineCore
    info: EngineInfo
    theirs: PreTrainedModel | None


def load_bench_model(name: str, config: EngineConfig, with_transformers: bool) -> BenchModel:
    """``bundled``, ``scaled``, ``large`` (a scaled copy of 8 billion parameters, for GPUs),
    ``smollm2``, or the path or hub id of any servable model.

    Raises FileNotFoundError without the bundled model, OSError and UnsupportedModelError as loading
    does.
    """
    device = torch.device(config.device)
    is_own = name in OWN
    path = str(bundled_path("target")) if is_own else name
    config = with_fastest_weights(replace(config, model=BUNDLED if is_own else name))
    tokenizer = load_tokenizer(path)
    theirs: PreTrainedModel | None = None
    if name in (SCALED, LARGE):
        ours = _scaled(name, path, device)
        theirs = _scaled(name, path, device) if with_transformers else None
    else:
        ours = load_model(path, device, config.dtype)
        if with_transformers:
            theirs = load_model(path, device, config.dtype)
    if theirs is not None:
        theirs.set_attn_implementation("sdpa")
    num_layers = int(ours.config.num_hidden_layers)
    engine = build_engine_for(ours, tokenizer, config, name)
    return BenchModel(
        name=name,
        what=_what(name, engine.info, num_layers),
        num_layers=num_layers,
        tokenizer=tokenizer,
        core=core_of(engine),
        info=engine.info,
        theirs=theirs,
    )


def core_of(engine: AsyncEngine) -> EngineCore:
    """The core of an engine that is never started, to be stepped by hand."""
    return engine.core


def scaled_copy(path: str, name: str = SCALED) -> LlamaForCausalLM:
    """``name``: which one. Raises TypeError for a model that is no Llama."""
    small = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if not isinstance(small, LlamaForCausalLM):
        raise TypeError("only a Llama has a scaled copy")
    if name == LARGE:
        return build_scaled_copy(small, _LARGE_WIDTH, min_params=_LARGE_PARAMETERS)
    return build_scaled_copy(small)


def _scaled(name: str, path: str, device: torch.device) -> PreTrainedModel:
    return prepare_model(scaled_copy(path, name), device)


def _what(name: str, info: EngineInfo, num_layers: int) -> str:
    weights = (
        info.dtype if info.quantization is None else f"weights in {info.quantization.bits:g} bits"
    )
    size = f"{info.num_parameters / 1e6:.1f} M parameters, {num_layers} layers, {weights}"
    if name == BUNDLED:
        return f"the bundled code model ({size})"
    if name in (SCALED, LARGE):
        times = "sixteen" if name == LARGE else "four"
        return (
            f"the {name} copy ({size}): the bundled model zero-padded {times} times in width, with "
            "layers added that change nothing, so that it writes the bundled model's text at the cost "
            "of its own size"
        )
    return f"{name} ({size})"
