"""Gives a model fewer and longer passes over its rows, by compiled kernels."""

from __future__ import annotations

import logging

from torch import nn

from engine.model.gated import fuse_gated
from engine.model.norms import fuse_norms
from engine.model.rotary import fuse_rotary

logger = logging.getLogger(__name__)


def fuse(model: nn.Module) -> None:
    """In place, once a model's weights are packed; a second time it finds nothing."""
    devices = {each.device.type for each in model.parameters()}
    if not devices <= {"cpu"} and devices != {"cuda"}:
        return
    counts = {"norms": fuse_norms(model)}
    if devices <= {"cpu"}:
        counts["rotary embeddings"] = fuse_rotary(model)
        counts["gated networks"] = fuse_gated(model)
    found = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    logger.info("in one pass each: %s", found or "nothing")
