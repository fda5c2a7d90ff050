"""Whether and where blocks are kept that the prefix cache evicts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from drafters.base import Drafter
from engine.config import EngineConfig
from engine.drafting.drafts import Draft
from engine.model.runner import ModelRunner
from engine.offload.identity import identity
from engine.offload.rows import BlockRows, StateBytes, parts_of
from engine.request.info import Determinism
from kvpool.slot_file import SlotFile, num_slots_for
from kvpool.tier import BlockBytes, BlockTier, MemorySlots, Slots

logger = logging.getLogger(__name__)


_STATES_SHARE = 0.5
"""The share of the bytes for states, if the model has any: as of memory (``engine.states.build``)."""


class Offload(NamedTuple):
    """Where evicted blocks are kept, and the states behind blocks. None: nothing is kept."""

    blocks: BlockTier | None = None
    states: BlockTier | None = None


def begin_offload(
    config: EngineConfig,
    runner: ModelRunner,
    drafters: Mapping[str, Drafter],
    weights: str,
    determinism: Determinism,
    drafts: Mapping[str, Draft],
) -> Offload:
    """``weights``: the digest of the model's, where a file is used. States have a file of their own,
    beside that of blocks. Raises ValueError where there is no room for a block or a state, or a file
    cannot be used."""
    if config.kv_offload_bytes is None:
        return Offload()
    parts = parts_of(
        drafters, runner.model.config.get_text_config().hidden_size, runner.model.dtype
    )
    most, path = config.kv_offload_bytes, config.kv_offload_file
    rows, known = BlockRows(runner.store, parts), {}
    if path is not None:
        known = identity(config, runner, weights, determinism, parts, drafts)
    if runner.states is None:
        return Offload(_tier(rows, "block", most, path, known))
    for_states = int(most * _STATES_SHARE)
    beside = None if path is None else f"{path}.states"
    states = _tier(StateBytes(runner.states.store), "state", for_states, beside, known)
    return Offload(_tier(rows, "block", most - for_states, path, known), states)


def _tier(
    content: BlockBytes, name: str, most: int, path: str | None, known: Mapping[str, str]
) -> BlockTier:
    """Returns a tier of ``most`` bytes. ``name``: of what it keeps, for messages; ``known``: the identity
    of its file."""
    size = content.num_bytes
    num_slots = most // size if path is None else num_slots_for(most, size)
    if num_slots < 1:
        raise ValueError(f"kv_offload_bytes: {most} has no room for a {name} of {size}")
    slots: Slots = (
        MemorySlots(num_slots, size)
        if path is None
        else SlotFile(Path(path), num_slots, size, known)
    )
    logger.info("KV offload: %d of %s, %d bytes each, %s", num_slots, name, size, path or "memory")
    return BlockTier(content, slots)
