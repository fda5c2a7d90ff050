"""Whether and where blocks are kept that the prefix cache evicts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from drafters.base import Drafter
from engine.config import EngineConfig
from engine.drafting.drafts import Draft
from engine.model.runner import ModelRunner
from engine.offload.identity import identity
from engine.offload.rows import BlockRows, parts_of
from engine.request.info import Determinism
from kvpool.slot_file import SlotFile, num_slots_for
from kvpool.tier import BlockTier, MemorySlots, Slots

logger = logging.getLogger(__name__)


def begin_offload(
    config: EngineConfig,
    runner: ModelRunner,
    drafters: Mapping[str, Drafter],
    weights: str,
    determinism: Determinism,
    drafts: Mapping[str, Draft],
) -> BlockTier | None:
    """None: nothing is kept. ``weights``: the digest of the model's, where a file is used. Raises
    ValueError where there is no room for a block, or a file cannot be used."""
    if config.kv_offload_bytes is None:
        return None
    parts = parts_of(
        drafters, runner.model.config.get_text_config().hidden_size, runner.model.dtype
    )
    rows = BlockRows(runner.store, parts)
    most, path = config.kv_offload_bytes, config.kv_offload_file
    num_slots = most // rows.num_bytes if path is None else num_slots_for(most, rows.num_bytes)
    if num_slots < 1:
        raise ValueError(f"kv_offload_bytes: {most} has no room for a block of {rows.num_bytes}")
    slots: Slots
    if path is None:
        slots = MemorySlots(num_slots, rows.num_bytes)
    else:
        known = identity(config, runner, weights, determinism, parts, drafts)
        slots = SlotFile(Path(path), num_slots, rows.num_bytes, known)
    logger.info(
        "KV offload: room for %d blocks of %d bytes, %d tokens, %s",
        num_slots,
        rows.num_bytes,
        num_slots * config.block_size,
        path or "in memory",
    )
    return BlockTier(rows, slots)
