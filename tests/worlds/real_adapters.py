"""Adapters of SmolLM2, random but large enough to change what it writes, and its weights with one
merged."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.model.loader import load_model
from engine.names import SMOLLM2
from engine.tokenizer import load_tokenizer
from worlds.lora_adapters import save_adapter

RANKS = {"small": 8, "large": 16, "rs": 16}
"""Three adapters of all linear layers."""
_SCALE = 0.06
"""Moves most tokens of a text, and leaves it a text."""


def write_adapters(folder: Path, dtype: torch.dtype) -> dict[str, Path]:
    """Writes the adapters, and beside each, under its name and ``-merged``, the model with its
    weights."""
    name = str(dtype).removeprefix("torch.")
    model = load_model(SMOLLM2, torch.device("cpu"), name, packed=False)
    tokenizer = load_tokenizer(SMOLLM2)
    for seed, (adapter, rank) in enumerate(RANKS.items()):
        settings = {"r": rank, "lora_alpha": rank, "use_rslora": adapter == "rs"}
        scale = _SCALE / (rank**0.5 if adapter == "rs" else 1)
        merged = save_adapter(folder / adapter, model, seed, scale, **settings)
        merged.save_pretrained(folder / f"{adapter}-merged")
        tokenizer.save_pretrained(folder / f"{adapter}-merged")
    return {adapter: folder / adapter for adapter in RANKS}
