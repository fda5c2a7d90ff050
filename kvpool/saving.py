"""Copies cached blocks to where they outlive memory, while an engine has nothing else to do."""

from __future__ import annotations

import logging
import time

from kvpool.block_pool import BlockPool

logger = logging.getLogger(__name__)

_SAVED_AT_ONCE = 8
"""Blocks that are copied before the engine looks into its inbox again: a millisecond or so."""
_WAIT_FOR_TIER = 0.01
_SAVE_SECONDS = 5.0


def save_some(pool: BlockPool) -> float | None:
    """Copies a few blocks. Returns after how many seconds to do it again if nothing has come in by then;
    None: nothing is left to copy."""
    if pool.tier is None or not pool.save(_SAVED_AT_ONCE):
        return None
    return 0.0 if all(tier.slots.is_ready for tier in pool.tiers) else _WAIT_FOR_TIER


def save_all(pool: BlockPool) -> None:
    """Copies all that is cached to where it outlives the process, as far as some seconds reach. Nothing
    runs any more."""
    if pool.tier is None or not pool.tier.slots.is_lasting:
        return
    pool.save_anew()
    deadline = time.monotonic() + _SAVE_SECONDS
    while (wait := save_some(pool)) is not None:
        if time.monotonic() > deadline:
            logger.warning("not all of the prefix cache was saved in %.0f s", _SAVE_SECONDS)
            return
        time.sleep(wait)
