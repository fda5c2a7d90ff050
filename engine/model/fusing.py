"""Gives a model on a CPU fewer and longer passes over its rows, where compiled kernels are to be had."""

from __future__ import annotations

import logging

from torch import nn

from engine.model.gated import fuse_gated
from engine.model.norms import fuse_norms
from engine.model.rotary import fuse_rotary

logger = logging.getLogger(__name__)


def fuse(model: nn.Module) -> None:
    """In place, once a model's weights are what they will be; a second time it finds nothing."""
    if any(each.device.type != "cpu" for each in model.parameters()):
        return
    counts = {
        "norms": fuse_norms(model),
        "rotary embeddings": fuse_rotary(model),
        "gated networks": fuse_gated(model),
    }
    found = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    logger.info("in one pass each: %s", found or "nothing")
