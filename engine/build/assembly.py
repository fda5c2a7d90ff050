"""Builds engines, and what the other ranks of one run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from engine.attention.backend import (
    IMPLEMENTATION,
    AttentionBackend,
    build_attention,
    check_backend_name,
)
from engine.build.core import build_core
from engine.build.drafters import hidden_layers, load_drafters
from engine.build.sizes import size_store, sizes_of_states, state_slots, states_info, wanted_len
from engine.build.target import (
    Target,
    attention_needs,
    load_target,
    prepare_target,
    with_fastest_weights,
)
from engine.capture.replays import graph_sizes
from engine.config import EngineConfig
from engine.core import EngineCore, ModelLimits
from engine.drafting.checked import check_drafts
from engine.drafting.drafts import check_names, find_drafts, with_bundled_drafts
from engine.drafting.heads import prepare_heads
from engine.drafting.located import located
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.constraint import Constrain
from engine.kv_events.begin import check_kv_events
from engine.lora.adapters import Adapters, load_all
from engine.lora.names import parse_adapters
from engine.machine import check_device
from engine.model.fusing import fuse
from engine.model.loader import attach_attention, sampling_defaults, state_shapes, unserved_parts
from engine.model.runner import ModelRunner
from engine.model.selfcheck import Exactness, check_logits, reference_logits, verify_exact
from engine.offload.begin import begin_offload
from engine.process.threaded import AsyncEngine
from engine.ranks.group import LeadingRunner, Ranks, follow_steps, join_ranks
from engine.request.info import DraftInfo, EngineInfo
from engine.states.build import StateSizes, build_states
from engine.tokenizer import load_tokenizer
from kvpool.state_slots import StateSlots

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
    model = load_target(completed, ranks)
    tokenizer = load_tokenizer(config.served_model, config.revision, config.trust_remote_code)
    return build_engine_for(model, tokenizer, completed, name, ranks), tokenizer


def follow_engine(config: EngineConfig) -> None:
    """Loads a part of the model and runs its rows with the first rank until that one is done: the other
    ranks call this in place of ``build_engine``. Raises as that, and RanksError where the first rank goes
    without a word."""
    check_device(config.device)
    ranks = join_ranks(config)
    assert ranks is not None, "a process that follows was launched as a rank"
    model = load_target(config, ranks)
    # What the first rank asks of the divided model while it builds takes all of them.
    prepare_heads(model, config, find_drafts(with_bundled_drafts(config)))
    reference_logits(model)
    shapes = attach_attention(model)
    fuse(model, wanted_len(model, config))
    needs = attention_needs(model, shapes, "fast", config)
    num_blocks, _ = size_store(model, needs, config, 0, ranks)
    attention = build_attention(needs, num_blocks, config.attention_backend)
    runner = ModelRunner(model, attention, config.max_num_batched_tokens, can_capture=False)
    follow_steps(runner, ranks)
    ranks.leave()


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
    target = prepare_target(model, tokenizer, config, ranks)
    placed = _place(target)
    runner, slots = placed.runner, placed.slots
    target.drafts.attach(runner, target.shapes, target.vocab_size, placed.max_model_len, slots)
    limits = ModelLimits(
        target.vocab_size, placed.max_model_len, target.eos_token_ids, _grammars(target)
    )
    checked = check_drafts(
        target.found, target.drafts, target.heads, runner, tokenizer, config, placed.max_model_len
    )
    drafters = load_drafters(target, runner, placed.max_model_len)
    adapters = None
    if ranks is None:
        adapters = Adapters(runner.serve_adapters(), name)
        load_all(adapters, parse_adapters(config.lora))
    layers = hidden_layers(drafters, config)
    runner.prepare(layers, chooses=True)
    offload = begin_offload(
        config, runner, drafters, target.weights, target.determinism, target.found
    )
    if slots is not None:
        slots.tier = offload.states
    core = build_core(runner, config, limits, drafters, layers, offload.blocks, slots)
    drafts = {key: draft for key, draft in checked.items() if key in drafters}
    info = _info(name, target, placed, core, drafts, adapters)
    logger.info("%s ready after %.1f s", name, time.perf_counter() - start)
    return AsyncEngine(core, info, info.max_num_open, adapters)


class _Placed(NamedTuple):
    """A target with a store for keys, values and states, checked. ``slots``: of states, where its layers
    keep some, as ``sizes`` says."""

    runner: ModelRunner
    max_model_len: int
    exactness: Exactness
    sizes: StateSizes | None
    slots: StateSlots | None


def _place(target: Target) -> _Placed:
    """Gives the target as much memory as there is, and checks its logits. Raises UnsupportedModelError
    where they are not those of transformers."""
    model, config, ranks, needs = target.model, target.config, target.ranks, target.needs
    sizes = sizes_of_states(model, config)
    num_blocks, longest = size_store(model, needs, config, target.draft_bytes, ranks, sizes)
    attention = build_attention(needs, num_blocks, config.attention_backend)
    runner = _runner(target, attention, longest, sizes)
    check_logits(runner, target.reference)
    exactness = Exactness()
    if target.determinism == "exact":
        exactness = verify_exact(runner, target.failures, config.determinism == "exact")
    slots = None if sizes is None else state_slots(sizes, config)
    return _Placed(runner, longest, exactness, sizes, slots)


def _runner(
    target: Target, attention: AttentionBackend, max_model_len: int, sizes: StateSizes | None
) -> ModelRunner:
    model, config = target.model, target.config
    if target.ranks is not None:
        return LeadingRunner(model, attention, config.max_num_batched_tokens, target.ranks)
    states = None
    if sizes is not None:
        device = attention.store.device
        states = build_states(state_shapes(model), sizes.num_slots, sizes.num_places, device)
    graphs = graph_sizes(config, attention, max_model_len, states=states)
    return ModelRunner(model, attention, config.max_num_batched_tokens, graphs, states=states)


def _grammars(target: Target) -> Constrain | None:
    """Returns what makes constraints of grammars; None where there is no tokenizer."""
    if target.tokenizer is None:
        return None
    compiler = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids)
    compiler.prepare()
    return compiler.constraint


def _info(
    name: str,
    target: Target,
    placed: _Placed,
    core: EngineCore,
    drafts: Mapping[str, DraftInfo],
    adapters: Adapters | None,
) -> EngineInfo:
    """Returns what the engine says of itself. ``drafts``: what its drafters draft with."""
    model, config, runner = target.model, target.config, placed.runner
    num_blocks = runner.store.num_blocks
    text_config = model.config.get_text_config()
    return EngineInfo(
        model=name,
        vocab_size=target.vocab_size,
        max_model_len=placed.max_model_len,
        max_num_nodes=config.max_num_nodes,
        eos_token_ids=target.eos_token_ids,
        drafters={key: drafter.info for key, drafter in core.speculation.drafters.items()},
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_open=config.max_num_seqs + config.max_num_waiting,
        num_parameters=target.num_parameters,
        determinism=target.determinism,
        attention_backend=runner.attention.name,
        exact_verified=placed.exactness.verified,
        exact_probed=placed.exactness.probed,
        exact_failed=placed.exactness.failed,
        quantization=target.quantization,
        tensor_parallel_size=config.tensor_parallel_size,
        unserved=unserved_parts(model),
        drafts=drafts,
        adapters=None if adapters is None else adapters.infos,
        architecture=text_config.model_type,
        hidden_size=text_config.hidden_size,
        embeddings=config.embeddings,
        sampling_defaults=sampling_defaults(model),
        states=states_info(model, config, placed.sizes),
        kv_bytes=runner.store.num_bytes + target.draft_bytes * num_blocks,
    )
