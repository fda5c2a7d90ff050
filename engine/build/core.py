"""The core: a cost model that was measured, pool, speculation and scheduler around a runner."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from drafters.base import Drafter
from engine.config import EngineConfig
from engine.core import EngineCore, ModelLimits
from engine.kv_events.begin import begin_kv_events
from engine.model.runner import ModelRunner
from engine.sampling.sampler import warm_up
from engine.schedule.scheduler import Scheduler
from engine.speculation.cost import CostModel, measure
from engine.speculation.manager import Speculation
from engine.verification import follow
from kvpool.block_pool import BlockPool
from kvpool.state_slots import StateSlots
from kvpool.tier import BlockTier


def build_core(
    runner: ModelRunner,
    config: EngineConfig,
    limits: ModelLimits,
    drafters: Mapping[str, Drafter],
    hidden_layers: tuple[int, ...],
    tier: BlockTier | None,
    slots: StateSlots | None,
) -> EngineCore:
    cost = _measured_cost(runner, config, limits)
    warm_up(limits.vocab_size, runner.store.device, runner.model.dtype)
    is_alone = config.tensor_parallel_size == 1
    runs_ahead = runner.device.type == "cuda" and is_alone and find_spec("triton") is not None
    if runs_ahead:
        follow.warm_up(runner.device)
    kv_events = begin_kv_events(config)
    listener = None if kv_events is None else kv_events.announcer
    pool = BlockPool(
        runner.store.num_blocks,
        config.block_size,
        config.enable_prefix_cache,
        listener,
        tier,
        slots,
    )
    shed_queue = config.shed_queue or max(1, config.max_num_waiting // 2)
    speculation = Speculation(
        drafters,
        cost,
        limits.vocab_size,
        config.max_num_nodes,
        pool,
        config.shed_speculation,
        shed_queue,
    )
    scheduler = Scheduler(
        pool,
        config.block_size,
        config.max_num_seqs if slots is None else slots.num_seats,
        config.max_num_batched_tokens,
        config.prefill_chunk,
        speculation,
    )
    return EngineCore(
        runner,
        pool,
        scheduler,
        speculation,
        cost,
        limits,
        config.check_integrity,
        kv_events=kv_events,
        hidden_layers=hidden_layers,
        runs_ahead=runs_ahead,
    )


def _measured_cost(runner: ModelRunner, config: EngineConfig, limits: ModelLimits) -> CostModel:
    """Returns what steps cost, measured over a few sizes. What the steps stored is cleared."""
    most = min(config.max_num_batched_tokens, limits.max_model_len, runner.store.num_slots)
    far = min(512, max(0, limits.max_model_len - 64))
    cost = CostModel(
        measure(
            runner.time_step,
            most,
            repeats=3,
            far_context=far,
            max_kv_tokens=runner.store.num_slots,
            budget_seconds=1.5,
            block_size=config.block_size,
        )
    )
    runner.expect(most)
    runner.store.clear()
    if runner.states is not None:
        runner.states.store.clear()
    return cost
