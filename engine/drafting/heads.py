"""Trained heads: the folders that they come in, what these have to hold, and the heads of one engine.

A folder holds ``config.json`` and ``model.safetensors``. The configuration names the kind, the sizes
that have to be the target's, and a fingerprint of the weights the heads were trained for: heads of
another checkpoint would still run and hardly ever be right.

Heads are made in two parts, as draft models are: folders are read before the target's layers are packed
(their fingerprint is of the weights as they were) and before the KV pool is sized (``prepare_heads``);
``medusa.py`` and ``eagle.py`` make heads of them when the target runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from drafters.base import DrafterUnavailableError
from engine.config import EngineConfig
from engine.model.checkpoint import not_finite
from engine.model.quantization import packed_weights
from engine.model.runner import ModelRunner
from engine.model.shards import whole, whole_layer
from engine.names import BUNDLED

logger = logging.getLogger(__name__)

OutputHead: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states ``[num_rows, hidden_size]`` to logits ``[num_rows, vocab_size]``."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_SAMPLES = 256
_SETTINGS = {"medusa": "medusa_heads", "eagle": "eagle_head"}
"""The settings that name folders, by kind."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The facts that heads have to fit. ``fingerprint`` as ``weights_fingerprint`` gives it."""

    hidden_size: int
    vocab_size: int
    fingerprint: str

    def as_config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "target_fingerprint": self.fingerprint,
        }


@torch.inference_mode()
def weights_fingerprint(model: nn.Module) -> str:
    """Returns 32 hexadecimal digits over names, shapes and a sample of every parameter's values.

    Values are rounded to bf16 first, so a checkpoint loaded in another type keeps its fingerprint.
    Call it before the engine packs the model's layers, and in all ranks that share the model.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = whole(parameter).detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].to(torch.bfloat16).cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    for name, packed in packed_weights(model):
        flat = packed.blocks.flatten()
        digest.update(f"{name}{packed.format}{tuple(packed.blocks.shape)}".encode())
        digest.update(flat[:: max(1, flat.numel() // _SAMPLES)].numpy().tobytes())
    return digest.hexdigest()[:32]


def target_facts(model: nn.Module) -> TargetFacts:
    """Returns the facts of a transformers causal LM that is not packed yet."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return TargetFacts(int(head.in_features), int(head.out_features), weights_fingerprint(model))


class HeadsRefusedError(ValueError):
    """The folder cannot be used with this target; the message says why."""


def write_heads(
    folder: Path, config: Mapping[str, Any], facts: TargetFacts, weights: nn.Module
) -> None:
    """Writes a folder that ``read_heads`` takes; bf16, the target's sizes and fingerprint included."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in weights.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    content = dict(config) | facts.as_config()
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """The contents of a folder, checked against the target."""

    path: Path
    facts: TargetFacts
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def sizes(self, *names: str) -> list[int]:
        """Returns positive whole numbers of the configuration. Raises HeadsRefusedError naming the first
        that is none."""
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
    """Returns a folder's configuration and tensors. Raises HeadsRefusedError with the reason."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(path / WEIGHTS)
    except FileNotFoundError as error:
        raise HeadsRefusedError(f"{path} does not hold {CONFIG} and {WEIGHTS}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise HeadsRefusedError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise HeadsRefusedError(f"{path}: {CONFIG} does not hold an object")
    for name, wanted in {"kind": kind, **facts.as_config()}.items():
        found = config.get(name)
        if found != wanted and name == "target_fingerprint":
            raise HeadsRefusedError(
                f"{path} was trained for other weights of the target; train it again with "
                f"python -m training.heads ({name} is {found!r}, this model's is {wanted!r})"
            )
        if found != wanted:
            raise HeadsRefusedError(f"{path}: {name} is {found!r}, and this model needs {wanted!r}")
    if faults := not_finite(tensors.items()):
        raise HeadsRefusedError(f"{path}: {faults[0]}")
    return HeadFolder(path, facts, config, tensors)


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """The heads of an engine. ``folders``, or the ``reasons`` why there is none, are by kind; ``dtype``
    and ``device`` are the target's. ``ends``: its input and output embeddings, where its own cannot be
    used in one process alone."""

    facts: TargetFacts
    folders: Mapping[str, HeadFolder]
    reasons: Mapping[str, str]
    config: EngineConfig
    dtype: torch.dtype
    device: torch.device
    ends: tuple[nn.Module, nn.Module] | None = None

    def folder(self, kind: str) -> HeadFolder:
        """Returns the folder of a kind. Raises DrafterUnavailableError with the reason where there is
        none."""
        if kind not in self.folders:
            raise DrafterUnavailableError(self.reasons[kind])
        return self.folders[kind]

    def ends_of(self, runner: ModelRunner) -> tuple[nn.Module, nn.Module]:
        """Returns the target's input and output embeddings."""
        return self.ends or _ends(runner.model)


def prepare_heads(target: PreTrainedModel, config: EngineConfig) -> DraftHeads:
    """Reads the folders of the settings, or those of the bundled target. ``target`` is not packed yet.

    Of ranks that share the target, all have to prepare them. Raises ValueError naming the setting whose
    folder does not fit; a bundled one that does not fit is left out with a warning.
    """
    facts = target_facts(target)
    folders: dict[str, HeadFolder] = {}
    reasons: dict[str, str] = {}
    for kind, setting in _SETTINGS.items():
        given = getattr(config, setting)
        if config.drafters is not None and kind not in config.drafters:
            reasons[kind] = "it is not among the drafters to load"
        elif given is None and not config.is_bundled:
            reasons[kind] = (
                f"there are no heads for this model; the setting {setting} names a folder"
            )
        else:
            path = BUNDLED / kind if given is None else Path(given)
            try:
                folders[kind] = read_heads(path, kind, facts)
            except HeadsRefusedError as error:
                if given is not None:
                    raise ValueError(f"{setting}: {error}") from error
                logger.warning("no %s drafter: %s", kind, error)
                reasons[kind] = str(error)
    ends = None
    if folders and config.tensor_parallel_size > 1:
        embed, output_head = _ends(target)
        ends = whole_layer(embed), whole_layer(output_head)
    return DraftHeads(facts, folders, reasons, config, target.dtype, target.device, ends)


def _ends(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()
