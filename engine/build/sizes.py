"""How many blocks and states of requests memory has room for, and how long a request may grow."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from engine.attention.backend import AttentionNeeds, choose_backend
from engine.config import EngineConfig
from engine.machine import free_bytes
from engine.model.loader import check_length, max_position, state_shapes
from engine.ranks.group import Ranks
from engine.request.errors import UnsupportedModelError
from engine.request.info import StatesInfo
from engine.states.build import LEAST_PLACES, StateSizes, size_states
from kvpool.state_slots import StateSlots
from kvpool.state_store import StateStore

logger = logging.getLogger(__name__)


def wanted_len(model: PreTrainedModel, config: EngineConfig) -> int:
    """Returns how long a request may grow as far as model and settings go. Raises UnsupportedModelError
    where the settings go beyond the model."""
    check_length(model.config, config.max_model_len)
    return config.max_model_len or max_position(model.config)


def sizes_of_states(model: PreTrainedModel, config: EngineConfig) -> StateSizes | None:
    """Returns how many states there is room for; None: the model's layers keep none. Raises
    UnsupportedModelError for what they are not served with."""
    shapes = state_shapes(model)
    if not shapes:
        return None
    if config.tensor_parallel_size > 1:
        raise UnsupportedModelError(
            "tensor_parallel_size: not for models whose layers keep a state"
        )
    # Drafts of a step; draft models over the target's states keep inputs of more nodes than are granted.
    num_drafted = config.max_num_seqs * config.max_num_nodes
    shares = config.quantized_model == "target" and config.quantized is not None
    if shares or config.prefix_layers is not None:
        # And of the tokens before, of which there are few where there are few drafts.
        num_rows = config.max_num_seqs * (max(config.max_num_nodes, LEAST_PLACES) + 1)
    else:
        num_rows = min(num_drafted, config.max_num_batched_tokens)
    sizes = size_states(shapes, _kv_bytes(model, config, None), config.max_num_seqs, num_rows)
    if sizes.num_seats < config.max_num_seqs:
        logger.warning(
            "%d requests may run at a time, not %d: memory has room for no more states",
            sizes.num_seats,
            config.max_num_seqs,
        )
    return sizes


def state_slots(sizes: StateSizes, config: EngineConfig) -> StateSlots:
    return StateSlots(*sizes, block_size=config.block_size, interval=_snapshot_tokens(config))


def states_info(
    model: PreTrainedModel, config: EngineConfig, sizes: StateSizes | None
) -> StatesInfo | None:
    if sizes is None:
        return None
    per_slot = StateStore.bytes_per_slot(state_shapes(model))
    return StatesInfo(sizes.num_seats, sizes.num_snapshots, per_slot, _snapshot_tokens(config))


def _snapshot_tokens(config: EngineConfig) -> int:
    """Prompts leave snapshots at ends of blocks."""
    return -(-config.state_snapshot_tokens // config.block_size) * config.block_size


def _kv_bytes(model: PreTrainedModel, config: EngineConfig, ranks: Ranks | None) -> int:
    """Returns the memory that is to be had for keys, values and states."""
    available = free_bytes(model.device)
    if model.device.type == "cpu":
        offloaded = config.kv_offload_bytes if config.kv_offload_file is None else None
        available = max(0, available - (offloaded or 0) - config.promised_bytes)
        available //= 1 if ranks is None else ranks.place.local_size
    return int(available * config.kv_memory_fraction)


def size_store(
    model: PreTrainedModel,
    needs: AttentionNeeds,
    config: EngineConfig,
    draft_bytes: int,
    ranks: Ranks | None,
    sizes: StateSizes | None = None,
) -> tuple[int, int]:
    """Returns blocks of the KV store, and how long a request may grow in it. ``draft_bytes``: what a
    block costs in the stores of draft models and heads besides; ``sizes``: of what states take. Ranks
    have as many as all of them can."""
    longest = wanted_len(model, config)
    num_blocks = config.num_blocks
    if num_blocks is None:
        backend = choose_backend(config.attention_backend, needs)
        per_block = max(1, draft_bytes + backend.bytes_per_block(needs))
        left = _kv_bytes(model, config, ranks)
        if sizes is not None:
            left -= sizes.num_bytes(state_shapes(model))
        affordable = left // per_block
        useful = config.max_num_seqs * -(-longest // config.block_size)
        num_blocks = max(1, min(affordable, useful))
        if ranks is not None:
            num_blocks = min(ranks.of_all(num_blocks))
    fitting = min(longest, num_blocks * config.block_size)
    if fitting < longest:
        logger.warning(
            "requests may have %d tokens, not %d: %d KV blocks of %d tokens hold no more",
            fitting,
            longest,
            num_blocks,
            config.block_size,
        )
    return num_blocks, fitting
