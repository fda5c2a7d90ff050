"""Adapters as PEFT writes them, random but sizable, and models with an adapter merged into their
weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.core import EngineCore
from engine.lora.adapters import Adapters
from engine.model.layers import LayerShape
from engine.request.params import GenerationRequest
from engine.schedule.request import Request
from worlds.engine_harness import Driver

LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def wrapped(model: PreTrainedModel, seed: int, scale: float = 1.0, **settings: Any) -> Any:
    """A copy of the model with a random adapter in PEFT's hands. ``scale``: how far it moves the layers,
    of the size of what they compute."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(LLAMA_LAYERS)} | settings
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        # PEFT asks transformers by names that are on their way out.
        warnings.simplefilter("ignore", FutureWarning)
        found: Any = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in found.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            drawn = torch.randn(weight.shape, generator=generator)
            by = weight.shape[1] ** -0.5 if "lora_A" in name else 0.3 * scale
            weight.data = (drawn * by).to(weight.dtype)
    return found


def save_adapter(
    folder: Path, model: PreTrainedModel, seed: int, scale: float = 1.0, **settings: Any
) -> PreTrainedModel:
    """Writes the folder of a random adapter, and returns the model with it merged into its weights, as
    PEFT reads it."""
    from peft import PeftModel

    # Else it adds the weights that an adapter of the head stands beside.
    wrapped(model, seed, scale, **settings).save_pretrained(folder, save_embedding_layers=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found: Any = PeftModel.from_pretrained(copy.deepcopy(model), folder)
        merged: PreTrainedModel = found.merge_and_unload()
    return merged


def random_parts(
    shapes: Mapping[str, LayerShape], seed: int, rank: int, scale: float = 0.5
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """An adapter of all these layers, as ``AdaptedLayers.pack`` takes it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, shape.in_features, generator=generator) * shape.in_features**-0.5,
            torch.randn(shape.out_features, rank, generator=generator) * scale,
        )
        for name, shape in shapes.items()
    }


class AdaptedDriver(Driver):
    """A driver whose requests may name adapters, as an engine's do."""

    def __init__(self, core: EngineCore, adapters: Adapters) -> None:
        super().__init__(core)
        self._adapters = adapters

    def prepared(self, each: GenerationRequest) -> Request:
        salted, adapter = self._adapters.applied_to(each)
        found = self.core.prepare(salted)
        found.adapter = adapter
        return found


def adapters_of(core: EngineCore, folders: Mapping[str, Path] | None = None) -> Adapters:
    """The core's, with those in the folders. Once for each core, before its first step."""
    runner: Any = core.runner
    found = Adapters(runner.serve_adapters(), "tiny")
    for name, folder in (folders or {}).items():
        found.load(name, str(folder))
    return found
