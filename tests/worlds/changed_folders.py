"""Folders of checkpoints of which one thing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def configure(folder: Path, part: str | None = None, **changes: Any) -> None:
    """Changes what the configuration says, or a ``part`` of it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config if part is None else config[part]).update(changes)
    path.write_text(json.dumps(config))


@contextmanager
def stored_tensors(folder: Path, name: str = WEIGHTS) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors that a file of the folder has; it has what they are made."""
    tensors = load_file(folder / name)
    yield tensors
    save_file(tensors, folder / name, {"format": "pt"})


def rename_tensors(folder: Path, renamed: Callable[[str], str], name: str = WEIGHTS) -> None:
    tensors = load_file(folder / name)
    tensors = {renamed(key): tensor for key, tensor in tensors.items()}
    save_file(tensors, folder / name, {"format": "pt"})
