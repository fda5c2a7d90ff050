"""The model that everybody runs, and the draft model, as checkpoints that everybody can read."""

from __future__ import annotations

from pathlib import Path

from bench.models import BUNDLED, SCALED, scaled_copy
from bench.peers.place import once
from engine.model.loader import bundled_path, load_tokenizer


def model_folders(model: str, draft: str | None, cache: Path) -> tuple[Path, Path]:
    """Target and draft. ``model``: ``scaled``, ``bundled`` or a folder; ``draft``: a folder, else the
    bundled draft model."""
    own_draft = bundled_path("draft") if draft is None else Path(draft)
    if model == SCALED:
        return once(cache / "scaled", _save_scaled), own_draft
    return (bundled_path("target") if model == BUNDLED else Path(model)), own_draft


def _save_scaled(folder: Path) -> None:
    path = str(bundled_path("target"))
    scaled_copy(path).save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
