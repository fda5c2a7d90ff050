"""The facts of a target that heads have to fit, and the fingerprint of its weights.

Heads of another checkpoint would still run and hardly ever be right, so folders may say which weights
they were trained for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.quantization import packed_weights
from engine.weights.shards import whole

_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The facts that heads have to fit. ``num_layers``: decoder layers; ``fingerprint`` as
    ``weights_fingerprint`` gives it."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    fingerprint: str


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
        digest.update(flat[:: max(1, flat.numel() // _SAMPLES)].cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def target_facts(model: PreTrainedModel) -> TargetFacts:
    """Returns the facts of a transformers causal LM that is not packed yet."""
    head: Any = model.get_output_embeddings()
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    fingerprint = weights_fingerprint(model)
    return TargetFacts(int(head.in_features), int(head.out_features), num_layers, fingerprint)
