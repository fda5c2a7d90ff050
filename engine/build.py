"""Puts an engine together: the one place where its parts meet and its sizes are decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafters.base import NORMED, Drafter, DrafterContext, hidden_layers_of
from drafters.registry import build_drafters, find_plugins
from engine.attention.backend import (
    IMPLEMENTATION,
    AttentionBackend,
    AttentionNeeds,
    KVShape,
    build_attention,
    check_backend_name,
    choose_backend,
    stored_dtype,
)
from engine.capture.replays import graph_sizes
from engine.config import EngineConfig
from engine.core import EngineCore, ModelLimits
from engine.drafting.checked import check_drafts
from engine.drafting.drafts import (
    SMALL_MODEL,
    Draft,
    check_names,
    find_drafts,
    with_bundled_drafts,
)
from engine.drafting.heads import DraftHeads, prepare_heads
from engine.drafting.located import located
from engine.drafting.models import DraftModels, prepare_drafts
from engine.grammar.compiler import Constrain, GrammarCompiler
from engine.kv_events.begin import begin_kv_events, check_kv_events
from engine.logs import log_through_root
from engine.lora.adapters import Adapters, load_all
from engine.lora.names import parse_adapters
from engine.machine import can_pack, check_device, free_bytes
from engine.model.fusing import fuse
from engine.model.int8 import is_exact
from engine.model.linear import pack_linears
from engine.model.loader import (
    attach_attention,
    check_length,
    eos_token_ids,
    load_model,
    max_position,
    sampling_defaults,
    state_shapes,
    unserved_parts,
)
from engine.model.quantization import (
    complete_packed,
    has_packed_weights,
    num_parameters,
    quantization_info,
    quantize_model,
    refusal,
    replace_linears,
    round_experts,
    round_inputs,
)
from engine.model.rounding.sequence import quantize_4_bits
from engine.model.rounding.texts import CALIBRATION_TOKENS, calibration_texts
from engine.model.runner import ModelRunner
from engine.model.selfcheck import (
    Exactness,
    blocks_needed,
    check_logits,
    reference_logits,
    verify_exact,
)
from engine.offload.begin import begin_offload
from engine.offload.identity import weights_digest
from engine.process.runtime import AsyncEngine
from engine.ranks.group import LeadingRunner, Ranks, follow_steps, join_ranks
from engine.request.errors import UnsupportedModelError
from engine.request.info import Determinism, EngineInfo, QuantizationInfo, StatesInfo
from engine.sampling.sampler import warm_up
from engine.schedule.scheduler import Scheduler
from engine.speculation.cost import CostModel, measure
from engine.speculation.manager import Speculation
from engine.states.build import StateSizes, build_states, checked_states, size_states
from engine.tokenizer import load_tokenizer
from engine.verification import follow
from kvpool.block_pool import BlockPool
from kvpool.state_slots import StateSlots
from kvpool.state_store import StateStore
from kvpool.tier import BlockTier

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> tuple[AsyncEngine, PreTrainedTokenizerBase]:
    """Loads the model and builds an engine around it; not yet started.

    Raises UnsupportedModelError with the reason if the model cannot be served, OSError if there is
    none, DrafterPluginError if an installed drafter plugin is at fault.
    """
    # Wrong names are refused before a model is fetched and loaded.
    check_names(config)
    check_device(config.device)
    check_backend_name(config.attention_backend)
    check_kv_events(config)
    config = located(config)
    completed = with_bundled_drafts(with_fastest_weights(config))
    ranks = join_ranks(config)
    name = config.model_name
    model = _load(completed, ranks)
    tokenizer = load_tokenizer(config.served_model, config.revision, config.trust_remote_code)
    return build_engine_for(model, tokenizer, completed, name, ranks), tokenizer


def follow_engine(config: EngineConfig) -> None:
    """Loads a part of the model and runs its rows with the first rank until that one is done: the other
    ranks call this in place of ``build_engine``. Raises as that, and RanksError where the first rank goes
    without a word."""
    check_device(config.device)
    ranks = join_ranks(config)
    assert ranks is not None, "a process that follows was launched as a rank"
    model = _load(config, ranks)
    # What the first rank asks of the divided model while it builds takes all of them.
    prepare_heads(model, config, find_drafts(with_bundled_drafts(config)))
    reference_logits(model)
    shapes = attach_attention(model)
    fuse(model, _wanted_len(model, config))
    needs = _needs(model, shapes, "fast", config)
    num_blocks, _ = _size_store(model, needs, config, 0, ranks)
    attention = build_attention(needs, num_blocks, config.attention_backend)
    runner = ModelRunner(model, attention, config.max_num_batched_tokens, can_capture=False)
    follow_steps(runner, ranks)
    ranks.leave()


def _load(config: EngineConfig, ranks: Ranks | None) -> PreTrainedModel:
    """Returns the model that is served, or this rank's part, on its device."""
    log_through_root("torch")
    device = torch.device(config.device) if ranks is None else ranks.device
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif ranks is not None and device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.place.local_size))
    return load_model(
        config.served_model,
        device,
        config.dtype,
        config.revision,
        config.trust_remote_code,
        config.tensor_parallel_size,
        packed=config.quantization is None,
        max_model_len=config.max_model_len,
    )


def with_fastest_weights(config: EngineConfig) -> EngineConfig:
    """Returns the settings with 8 bits for the bundled model where the CPU has the instructions, if
    nothing else is asked for. Other models are for their owners to say."""
    copies_target = config.quantized is not None and config.quantized_model == "target"
    is_open = (
        config.is_bundled
        and (config.quantization, config.dtype) == (None, "auto")
        and (config.tensor_parallel_size, torch.device(config.device).type) == (1, "cpu")
        and not copies_target
    )
    return replace(config, quantization="int8") if is_open and is_exact() else config


def build_engine_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    name: str = "model",
    ranks: Ranks | None = None,
) -> AsyncEngine:
    """Returns an engine around a model that ``prepare_model`` or ``load_model`` gave back, and that is
    the engine's from then on. ``ranks``: those that the model is divided among, of which this is the
    first. Raises UnsupportedModelError, DrafterPluginError, and ValueError for another engine's model."""
    if model.config._attn_implementation == IMPLEMENTATION:
        raise ValueError("the model belongs to another engine; load it once more")
    if ranks is None and config.tensor_parallel_size > 1:
        raise ValueError(
            "tensor_parallel_size: this model is whole; only one from a folder is divided"
        )
    start = time.perf_counter()
    # Exact where it was shown to be reachable.
    usual: Determinism = "exact" if model.device.type == "cpu" and ranks is None else "fast"
    determinism = config.determinism or usual
    num_weights = num_parameters(model)
    eos = eos_token_ids(model, tokenizer)
    found = find_drafts(config)
    heads = prepare_heads(model, config, found)
    vocab_size = heads.facts.vocab_size
    reference = reference_logits(model)
    weights = "" if config.kv_offload_file is None else weights_digest(model)
    quantization = _quantize(model, tokenizer, reference, config)
    drafts = prepare_drafts(model, tokenizer, config, found)
    shapes = attach_attention(model)
    exact, failures = determinism == "exact", set[str]()
    if ranks is None and (exact or can_pack(model.device, model.dtype)):
        failures = pack_linears(model, config.max_num_batched_tokens, exact)
    fuse(model, _wanted_len(model, config))
    draft_bytes = drafts.bytes_per_block() + heads.bytes_per_block()
    needs = _needs(model, shapes, determinism, config)
    sizes = _size_states(model, config)
    num_blocks, max_model_len = _size_store(model, needs, config, draft_bytes, ranks, sizes)
    attention = build_attention(needs, num_blocks, config.attention_backend)
    runner = _runner(model, attention, config, max_model_len, ranks, sizes)
    check_logits(runner, reference)
    exactness = Exactness()
    if exact:
        exactness = verify_exact(runner, failures, config.determinism == "exact")
    slots = None if sizes is None else _state_slots(sizes, config)
    drafts.attach(runner, shapes, vocab_size, max_model_len, slots)
    constrain = None if tokenizer is None else _grammars(tokenizer, vocab_size, eos)
    checked = check_drafts(found, drafts, heads, runner, tokenizer, config, max_model_len)
    context = _context(runner, config, vocab_size, drafts, heads, tokenizer, found, max_model_len)
    methods = {key: draft.method for key, draft in found.items()}
    plugins = find_plugins(config.drafter_plugins)
    drafters = build_drafters(config.drafters, context, plugins, methods)
    adapters = None
    if ranks is None:
        adapters = Adapters(runner.serve_adapters(), name)
        load_all(adapters, parse_adapters(config.lora))
    wanted = set(hidden_layers_of(drafters.values()))
    if config.embeddings != "none":
        wanted.add(NORMED)
    hidden_layers = tuple(sorted(wanted))
    runner.prepare(hidden_layers, chooses=True)
    limits = ModelLimits(vocab_size, max_model_len, eos, constrain)
    offload = begin_offload(config, runner, drafters, weights, determinism, found)
    if slots is not None:
        slots.tier = offload.states
    core = _build_core(runner, config, limits, drafters, hidden_layers, offload.blocks, slots)
    text_config = model.config.get_text_config()
    info = EngineInfo(
        model=name,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_nodes=config.max_num_nodes,
        eos_token_ids=eos,
        drafters={key: drafter.info for key, drafter in core.speculation.drafters.items()},
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_parameters=num_weights,
        determinism=determinism,
        attention_backend=runner.attention.name,
        exact_verified=exactness.verified,
        exact_probed=exactness.probed,
        exact_failed=exactness.failed,
        quantization=quantization,
        tensor_parallel_size=config.tensor_parallel_size,
        unserved=unserved_parts(model),
        drafts={name: info for name, info in checked.items() if name in drafters},
        adapters=None if adapters is None else adapters.infos,
        architecture=text_config.model_type,
        hidden_size=text_config.hidden_size,
        embeddings=config.embeddings,
        sampling_defaults=sampling_defaults(model),
        states=_states_info(model, config, sizes),
        kv_bytes=runner.store.num_bytes + draft_bytes * num_blocks,
    )
    logger.info("%s ready after %.1f s", name, time.perf_counter() - start)
    return AsyncEngine(core, info, config.max_num_seqs + config.max_num_waiting, adapters)


def _quantize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    reference: torch.Tensor,
    config: EngineConfig,
) -> QuantizationInfo | None:
    """Gives linear layers 8 or 4 bits where that is asked for, and rounds their inputs, too, as those of
    weights that came in few bits. Raises UnsupportedModelError where it cannot be had."""
    is_packed = has_packed_weights(model)
    if is_packed and config.quantization is not None:
        raise UnsupportedModelError(
            f"quantization={config.quantization}: the model's weights are in few bits already"
        )
    if not is_packed and config.quantization in (None, "none"):
        return None
    # Before: afterwards rounding would hide what a model keeps besides keys and values.
    _check_unrounded(model, reference, config)
    if config.quantization == "int8":
        quantize_model(model, config.quantize_head)
    else:
        if config.quantization == "int4":
            _calibrate(model, tokenizer)
        complete_packed(model, config.quantize_head)
    round_inputs(model, config.quantize_activations)
    return quantization_info(model)


def _calibrate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Rounds the decoder's linear layers to 4 bits by what they read in texts of the model's own."""
    if tokenizer is None:
        raise UnsupportedModelError(
            "quantization=int4: a model without a tokenizer writes no texts to calibrate on"
        )
    logger.info("rounding to 4 bits; `slipstream quantize --bits 4` does it once for all starts")
    texts = calibration_texts(model, tokenizer, None, CALIBRATION_TOKENS)
    if refusal(model.device) is None:
        round_experts(model, "int4")
    replace_linears(model, quantize_4_bits(model, texts), "int4")


def _check_unrounded(model: PreTrainedModel, reference: torch.Tensor, config: EngineConfig) -> None:
    """Raises UnsupportedModelError unless the engine's forward writes transformers' own logits."""
    own = model.config._attn_implementation
    shapes = attach_attention(model)
    needs = replace(_needs(model, shapes, "fast", config), kv_dtype=None)
    attention = build_attention(needs, blocks_needed(config.block_size), config.attention_backend)
    check_logits(
        ModelRunner(
            model,
            attention,
            can_capture=False,
            states=checked_states(state_shapes(model), model.device),
        ),
        reference,
    )
    model.config._attn_implementation = own


def _needs(
    model: PreTrainedModel, shapes: list[KVShape], determinism: Determinism, config: EngineConfig
) -> AttentionNeeds:
    kv_dtype = stored_dtype(config.kv_cache_dtype)
    return AttentionNeeds.of(model, shapes, determinism, config.block_size, kv_dtype)


def _grammars(tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> Constrain:
    compiler = GrammarCompiler(tokenizer, vocab_size, eos)
    compiler.prepare()
    return compiler.constraint


def _runner(
    model: PreTrainedModel,
    attention: AttentionBackend,
    config: EngineConfig,
    max_model_len: int,
    ranks: Ranks | None,
    sizes: StateSizes | None,
) -> ModelRunner:
    if ranks is not None:
        return LeadingRunner(model, attention, config.max_num_batched_tokens, ranks)
    states = None
    if sizes is not None:
        device = attention.store.device
        states = build_states(state_shapes(model), sizes.num_slots, sizes.num_places, device)
    graphs = graph_sizes(config, attention, max_model_len, states=states)
    return ModelRunner(model, attention, config.max_num_batched_tokens, graphs, states=states)


def _context(
    runner: ModelRunner,
    config: EngineConfig,
    vocab_size: int,
    drafts: DraftModels,
    heads: DraftHeads,
    tokenizer: PreTrainedTokenizerBase | None,
    found: Mapping[str, Draft],
    max_model_len: int,
) -> DrafterContext:
    """Returns what the engine lends to drafters; no encoder where the target came without a tokenizer."""

    def draft_model(name: str) -> Any:
        is_head = name in found and found[name].method != SMALL_MODEL
        return heads.load(name, runner, max_model_len) if is_head else drafts.get(name)

    lent: dict[str, Callable[..., Any]] = {"draft_model": draft_model}
    if tokenizer is not None:
        lent["encode"] = partial(tokenizer.encode, add_special_tokens=False)
    own = config.drafter_settings
    if all(draft.is_bundled for draft in found.values()):
        # Heads that come with a model have not earned a place in auto yet: it carries the target's
        # states for them in every step (docs/benchmarks.md).
        own = {**own, "auto": {"head": "none"} | dict(own.get("auto", {}))}
    # A draft has the settings of its method.
    settings = {**own, **{key: own.get(draft.method, {}) for key, draft in found.items()}}
    return DrafterContext(vocab_size, settings, **lent)


def _wanted_len(model: PreTrainedModel, config: EngineConfig) -> int:
    """Returns how long a request may grow as far as model and settings go. Raises UnsupportedModelError
    where the settings go beyond the model."""
    check_length(model.config, config.max_model_len)
    return config.max_model_len or max_position(model.config)


def _size_states(model: PreTrainedModel, config: EngineConfig) -> StateSizes | None:
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
    num_rows = num_drafted
    if not shares and config.prefix_layers is None:
        num_rows = min(num_drafted, config.max_num_batched_tokens)
    sizes = size_states(shapes, _kv_bytes(model, config, None), config.max_num_seqs, num_rows)
    if sizes.num_seats < config.max_num_seqs:
        logger.warning(
            "%d requests may run at a time, not %d: memory has room for no more states",
            sizes.num_seats,
            config.max_num_seqs,
        )
    return sizes


def _state_slots(sizes: StateSizes, config: EngineConfig) -> StateSlots:
    return StateSlots(*sizes, block_size=config.block_size, interval=_snapshot_tokens(config))


def _states_info(
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
    if model.device.type == "cpu" and config.kv_offload_file is None:
        available = max(0, available - (config.kv_offload_bytes or 0))
    if model.device.type == "cpu":
        available = max(0, available - config.promised_bytes)
    if ranks is not None and model.device.type == "cpu":
        available //= ranks.place.local_size
    return int(available * config.kv_memory_fraction)


def _size_store(
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
    wanted_len = _wanted_len(model, config)
    num_blocks = config.num_blocks
    if num_blocks is None:
        backend = choose_backend(config.attention_backend, needs)
        per_block = max(1, draft_bytes + backend.bytes_per_block(needs))
        left = _kv_bytes(model, config, ranks)
        if sizes is not None:
            left -= sizes.num_bytes(state_shapes(model))
        affordable = left // per_block
        useful = config.max_num_seqs * -(-wanted_len // config.block_size)
        num_blocks = max(1, min(affordable, useful))
        if ranks is not None:
            num_blocks = min(ranks.of_all(num_blocks))
    longest = min(wanted_len, num_blocks * config.block_size)
    if longest < wanted_len:
        logger.warning(
            "requests may have %d tokens, not %d: %d KV blocks of %d tokens hold no more",
            longest,
            wanted_len,
            num_blocks,
            config.block_size,
        )
    return num_blocks, longest


def _build_core(
    runner: ModelRunner,
    config: EngineConfig,
    limits: ModelLimits,
    drafters: Mapping[str, Drafter],
    hidden_layers: tuple[int, ...],
    tier: BlockTier | None,
    slots: StateSlots | None,
) -> EngineCore:
    most = min(config.max_num_batched_tokens, limits.max_model_len, runner.store.num_slots)
    far = min(512, max(0, limits.max_model_len - 64))
    cost = CostModel(
        measure(
            runner.time_step,
            most,
            repeats=2,
            far_context=far,
            max_kv_tokens=runner.store.num_slots,
            budget_seconds=1.5,
            block_size=config.block_size,
        )
    )
    runner.store.clear()
    if runner.states is not None:
        runner.states.store.clear()
    warm_up(limits.vocab_size, runner.store.device)
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
