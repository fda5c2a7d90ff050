"""Folders of trained heads: their contents, their target, and the reasons for which one is refused.

A folder holds ``config.json`` and ``model.safetensors``. The configuration names the kind, the sizes
that have to be the target's, and a fingerprint of the weights the heads were trained for: heads of
another checkpoint would still run and hardly ever be right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from engine.model.checkpoint import not_finite
from engine.model.shards import whole

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The facts that heads have to fit. ``fingerprint`` as ``weights_fingerprint`` gives it."""

    hidden_size: int
    vocab_size: int
    fingerprint: str


@torch.inference_mode()
def weights_fingerprint(model: nn.Module) -> str:
    """32 hexadecimal digits over names, shapes and a sample of every parameter's values.

    Values are rounded to bf16 first, so a checkpoint loaded in another type keeps its fingerprint.
    Call it before the engine packs the model's layers, and in all ranks that share the model.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = whole(parameter).detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].to(torch.bfloat16).cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def target_facts(model: nn.Module) -> TargetFacts:
    """The facts of a transformers causal LM that is not packed yet."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return TargetFacts(int(head.in_features), int(head.out_features), weights_fingerprint(model))


class HeadsRefusedError(ValueError):
    """The folder cannot be used with this target; the message says why."""


def write_heads(
    folder: Path, config: Mapping[str, Any], facts: TargetFacts, weights: nn.Module
) -> None:
    """Write a folder that ``read_heads`` takes; bf16, the target's sizes and fingerprint included."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in weights.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    content = dict(config) | {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "target_fingerprint": facts.fingerprint,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """The contents of a folder, checked against the target."""

    path: Path
    facts: TargetFacts
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def sizes(self, *names: str) -> list[int]:
        """Positive whole numbers of the configuration. Raises HeadsRefusedError naming the first that
        is none."""
        values = []
        for name in names:
            value = self.config.get(name)
            if type(value) is not int or not 1 <= value < 1 << 24:
                raise HeadsRefusedError(
                    f"{self.path}: {name} is {value!r}, not a positive whole number"
                )
            values.append(value)
        return values

    def load_into(self, module: nn.Module) -> None:
        """Raises HeadsRefusedError where the tensors do not fit the module."""
        try:
            module.load_state_dict(dict(self.tensors))
        except RuntimeError as error:
            raise HeadsRefusedError(f"{self.path}: {' '.join(str(error).split())}") from error


def read_heads(path: Path, kind: str, facts: TargetFacts) -> HeadFolder:
    """A folder's configuration and tensors. Raises HeadsRefusedError with the reason."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(path / WEIGHTS)
    except FileNotFoundError as error:
        raise HeadsRefusedError(f"{path} does not hold {CONFIG} and {WEIGHTS}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise HeadsRefusedError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise HeadsRefusedError(f"{path}: {CONFIG} does not hold an object")
    expected = {
        "kind": kind,
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "target_fingerprint": facts.fingerprint,
    }
    for name, wanted in expected.items():
        found = config.get(name)
        if found != wanted:
            if name == "target_fingerprint":
                raise HeadsRefusedError(
                    f"{path} was trained for other weights of the target; train it again with "
                    f"python -m training.heads ({name} is {found!r}, this model's is {wanted!r})"
                )
            raise HeadsRefusedError(f"{path}: {name} is {found!r}, and this model needs {wanted!r}")
    if faults := not_finite(tensors.items()):
        raise HeadsRefusedError(f"{path}: {faults[0]}")
    return HeadFolder(path, facts, config, tensors)
