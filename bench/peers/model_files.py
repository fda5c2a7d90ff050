"""The model that everybody runs, and the draft model, as checkpoints that everybody can read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bench.models import OWN, SCALED, scaled_copy
from bench.peers.place import once
from engine.gguf.file import find_gguf
from engine.model.loader import bundled_path, load_model, load_tokenizer
from engine.names import locate


def model_folders(model: str, draft: str | None, cache: Path) -> tuple[Path, Path | None]:
    """Target and draft, None where there is none. ``model``: ``scaled``, ``bundled``, ``smollm2``, a
    folder or a GGUF file, of which everybody gets the dequantised weights; ``draft``: a folder, else the
    bundled draft model for those that it fits. Raises OSError and UnsupportedModelError as loading does.
    """
    own_draft = bundled_path("draft") if model in OWN else None
    wanted_draft = own_draft if draft is None else Path(draft)
    if model == SCALED:
        return once(cache / "scaled", _save_scaled), wanted_draft
    gguf = find_gguf(locate(model))
    if gguf is not None:
        return once(cache / gguf.stem, partial(_save_dequantised, model)), wanted_draft
    return Path(locate(model)), wanted_draft


def _save_dequantised(model: str, folder: Path) -> None:
    """In bf16, as the engine serves it. ``model``: what is in a GGUF file."""
    load_model(model, torch.device("cpu"), "bfloat16").save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)


def _save_scaled(folder: Path) -> None:
    path = str(bundled_path("target"))
    scaled_copy(path).save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
