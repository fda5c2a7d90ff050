"""Builds the models that draft for a target: small ones, a quantised copy, some of its own layers.

Built in two parts. Before the target takes the engine's attention and its weights are packed, what
has to be read from it as it was, and what takes memory, so that the KV pool is sized from what is left
(``prepare_drafts``); afterwards runners over the stores (``DraftModels.attach``). Each model passes
the start-up check that the target passes: our forward writes transformers' logits.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafters.base import DrafterUnavailableError
from drafters.registry import draft_models
from engine.attention.backend import (
    IMPLEMENTATION,
    AttentionNeeds,
    KVShape,
    build_attention,
    choose_backend,
    stored_dtype,
)
from engine.capture.replays import graph_sizes
from engine.config import EngineConfig, Quantization
from engine.drafting.draft_model import DraftLimits, EngineDraftModel
from engine.drafting.drafts import SMALL_MODEL, Draft, is_wanted
from engine.drafting.layer_subset import layer_subset, parse_layers
from engine.drafting.own_states import OwnStates
from engine.machine import can_pack
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.loader import (
    attach_attention,
    load_model,
    load_tokenizer,
    max_position,
    state_shapes,
)
from engine.model.quantization import (
    complete_packed,
    has_packed_weights,
    num_parameters,
    quantize_model,
    refusal,
    round_inputs,
)
from engine.model.runner import ModelRunner
from engine.model.selfcheck import blocks_needed, check_logits, reference_logits
from engine.request.errors import UnsupportedModelError
from engine.states.build import build_states, checked_states
from engine.states.plan import ModelStates
from kvpool.state_slots import StateSlots
from kvpool.store import KVStore

logger = logging.getLogger(__name__)

_SHARED_CATCH_UP_ROWS = 32
"""A draft model on the target's rows waits a step rather than run a prompt chunk that the target is
about to run."""
NO_DRAFT = "there is no draft for it; the setting draft names one"
_GROUP_SIZE = 32
"""Weights of a 4-bit copy that share a scale."""


@dataclass(slots=True)
class _Prepared:
    """A draft model before there are stores. ``shapes`` of its own rows; None: it uses the target's.

    ``rebuild`` makes it anew from the target as the engine runs it. ``num_parameters``: of one with
    weights of its own, as loaded."""

    model: PreTrainedModel
    reference: torch.Tensor  # [num_check_tokens, vocab_size], transformers' own logits
    shapes: list[KVShape] | None = None
    rebuild: Callable[[PreTrainedModel], PreTrainedModel] | None = None
    num_parameters: int = 0


class DraftModels:
    """The draft models of an engine, by drafter."""

    def __init__(
        self, prepared: dict[str, _Prepared], reasons: dict[str, str], config: EngineConfig
    ) -> None:
        self._prepared = prepared
        self._reasons = reasons
        self._config = config
        self._ready: dict[str, EngineDraftModel] = {}

    def bytes_per_block(self) -> int:
        """Returns the bytes that one more block of the pool costs in stores of draft models."""
        total = 0
        for each in self._prepared.values():
            if each.shapes is not None:
                needs = self._needs(each.model, each.shapes)
                name = self._config.attention_backend
                total += choose_backend(name, needs, strict=False).bytes_per_block(needs)
        return total

    def attach(
        self,
        runner: ModelRunner,
        shapes: list[KVShape],
        vocab_size: int,
        max_model_len: int,
        slots: StateSlots | None = None,
    ) -> None:
        """Makes runners: over the target's store, or over stores with as many blocks. ``slots``: of the
        target's states."""
        for name, each in self._prepared.items():
            model = each.rebuild(runner.model) if each.rebuild is not None else each.model
            owns_rows = each.shapes is not None
            needs = self._needs(model, each.shapes or shapes)
            store = runner.store.num_blocks if owns_rows else runner.store
            self._check(name, model, needs, each.reference)
            round_inputs(model, self._config.quantize_activations)
            shared = state_shapes(model) and not owns_rows
            states = runner.states if shared else self._own_states(model)
            drafting = self._runner(model, needs, store, states)
            drafting.prepare()
            most_rows = self._config.max_num_batched_tokens if owns_rows else _SHARED_CATCH_UP_ROWS
            max_len = min(max_position(model.config), max_model_len)
            limits = DraftLimits(vocab_size, max_len, most_rows)
            own = None if states is None else OwnStates(*self._seats())
            books = slots if shared else own
            self._ready[name] = EngineDraftModel(drafting, limits, owns_rows, books)

    def get(self, name: str) -> EngineDraftModel:
        """Returns a drafter's model. Raises DrafterUnavailableError with the reason if there is none."""
        if name not in self._ready:
            raise DrafterUnavailableError(self._reasons.get(name, NO_DRAFT))
        return self._ready[name]

    def has(self, name: str) -> bool:
        """Whether there is a model for a drafter."""
        return name in self._ready

    def num_parameters(self, name: str) -> int:
        """Returns how many parameters a drafter's small model has."""
        return self._prepared[name].num_parameters

    def _seats(self) -> tuple[int, int]:
        """Returns how many requests have a state of a draft model's own, and places for drafted rows."""
        return self._config.max_num_seqs, self._config.max_num_nodes + 1

    def _own_states(self, model: PreTrainedModel) -> ModelStates | None:
        num_seats, num_places = self._seats()
        return build_states(state_shapes(model), num_seats, num_seats * num_places, model.device)

    def _needs(self, model: PreTrainedModel, shapes: list[KVShape]) -> AttentionNeeds:
        kv_dtype = stored_dtype(self._config.draft_kv_dtype)
        return AttentionNeeds.of(model, shapes, "fast", self._config.block_size, kv_dtype)

    def _runner(
        self,
        model: PreTrainedModel,
        needs: AttentionNeeds,
        store: KVStore | int,
        states: ModelStates | None,
    ) -> ModelRunner:
        config = self._config
        attention = build_attention(needs, store, config.attention_backend, strict=False)
        if states is not None:
            return ModelRunner(model, attention, config.max_num_batched_tokens, states=states)
        graphs = graph_sizes(config, attention, max_position(model.config), strict=False)
        return ModelRunner(model, attention, config.max_num_batched_tokens, graphs)

    def _check(
        self, name: str, model: PreTrainedModel, needs: AttentionNeeds, reference: torch.Tensor
    ) -> None:
        """Checks in a store of its own, in the model's type: an 8-bit one would not pass, nor has to."""
        needs, num_blocks = replace(needs, kv_dtype=None), blocks_needed(needs.block_size)
        try:
            states = checked_states(state_shapes(model), model.device)
            check_logits(self._runner(model, needs, num_blocks, states), reference)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"the model of the {name} drafter: {error}") from error


def prepare_drafts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    drafts: Mapping[str, Draft],
) -> DraftModels:
    """Loads and builds what the settings ask for. ``target`` still runs on transformers' own attention.
    ``drafts``: those of the settings; heads among them are left to others.

    Raises ValueError, UnsupportedModelError or OSError where a setting names what cannot be used.
    """
    for setting, name in _SETTINGS.items():
        if getattr(config, setting) is not None and not is_wanted(config, name):
            raise ValueError(f"{setting} is set, but drafters leaves out {name}")
    sources = _Sources(target, tokenizer, config, drafts)
    prepared: dict[str, _Prepared] = {}
    reasons: dict[str, str] = {}
    for name, draft in drafts.items():
        is_loaded = config.drafters is None or name in config.drafters
        if draft.method == SMALL_MODEL and is_loaded:
            prepared[name] = _small_model(sources, draft.path)
    for name, kind in draft_models().items():
        if kind not in _PREPARE or not is_wanted(config, name):
            continue
        made = _PREPARE[kind](sources)
        if isinstance(made, str):
            reasons[name] = made
        else:
            prepared[name] = made
    return DraftModels(prepared, reasons, config)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The inputs for building draft models. ``target`` still runs on transformers' own attention."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: EngineConfig
    drafts: Mapping[str, Draft]


def _small_model(sources: _Sources, path: str) -> _Prepared:
    config = sources.config
    model = _load_small(sources, path)
    size = num_parameters(model)
    if has_packed_weights(model):
        complete_packed(model, config.quantize_head)
    prepared = _prepared(model, owns_rows=True)
    prepared.num_parameters = size
    if can_pack(model.device, model.dtype):
        pack_linears(model, config.max_num_batched_tokens, exact=False)
    return prepared


def _quantized(sources: _Sources) -> _Prepared | str:
    target, config = sources.target, sources.config
    if config.quantized is None:
        return "there is no quantised copy; the setting quantized makes one"
    if config.quantized_model == "target":
        if has_packed_weights(target):
            raise ValueError(
                "quantized: the target's weights are in few bits themselves; "
                "quantized_model=draft copies the draft"
            )
        return _prepared(quantized_copy(target, config.quantized), owns_rows=False)
    if SMALL_MODEL not in sources.drafts:
        raise ValueError(f"quantized_model: the setting draft names no {SMALL_MODEL}")
    small = _load_small(sources, sources.drafts[SMALL_MODEL].path, packed=False)
    return _prepared(quantized_copy(small, config.quantized), owns_rows=True)


def _prefix_layers(sources: _Sources) -> _Prepared | str:
    target, config = sources.target, sources.config
    if config.prefix_layers is None:
        return "no layers are chosen; the setting prefix_layers does"
    layers = parse_layers(config.prefix_layers, target.config.num_hidden_layers)

    def rebuild(model: PreTrainedModel) -> PreTrainedModel:
        shallow = layer_subset(model, layers)
        shallow.config._attn_implementation = IMPLEMENTATION
        return shallow

    shallow = layer_subset(target, layers)
    try:
        reference = reference_logits(shallow)
    except Exception as error:  # some are built around the number of their layers
        name = type(target).__name__
        reason = f"prefix_layers: {name} does not run with some of its layers alone: {error}"
        raise UnsupportedModelError(reason) from error
    return _Prepared(shallow, reference, rebuild=rebuild)


_PREPARE: dict[str, Callable[[_Sources], _Prepared | str]] = {
    "quantized": _quantized,
    "layers": _prefix_layers,
}
"""The makers of draft models from the target, by kind as in ``DrafterNeeds.draft_model``."""
_SETTINGS = {"quantized": "quantized", "prefix_layers": "prefix_layers"}
"""The drafters that a setting is for."""


def _load_small(sources: _Sources, path: str, packed: bool = True) -> PreTrainedModel:
    target, tokenizer, config = sources.target, sources.tokenizer, sources.config
    trusts = config.trust_remote_code
    model = load_model(path, target.device, config.dtype, None, trusts, packed=packed)
    own_tokenizer = None if tokenizer is None else load_tokenizer(path, None, trusts)
    check_vocabulary(target, tokenizer, model, own_tokenizer, path)
    return model


def check_vocabulary(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft: PreTrainedModel,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    name: str,
) -> None:
    """Raises UnsupportedModelError unless a token id means the same text to both.

    Output layers may be padded to different sizes if the tokenizers agree and have no token beyond the
    draft's; without tokenizers to compare, the sizes have to.
    """
    sizes = [int(model.get_output_embeddings().out_features) for model in (target, draft)]
    if tokenizer is None or draft_tokenizer is None:
        if sizes[0] != sizes[1]:
            raise UnsupportedModelError(
                f"draft model {name}: its vocabulary has {sizes[1]} tokens, the target's {sizes[0]}"
            )
        return
    mine, its = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if its and max(its.values()) >= sizes[1]:
        raise UnsupportedModelError(
            f"draft model {name}: its vocabulary has {sizes[1]} tokens, and its tokenizer writes "
            f"{max(its.values())}"
        )
    if mine == its:
        return
    differing = sorted(token for token in set(mine) | set(its) if mine.get(token) != its.get(token))
    raise UnsupportedModelError(
        f"draft model {name}: its tokenizer is not the target's; {len(differing)} tokens differ, "
        f"for instance {differing[0]!r} ({mine.get(differing[0])} in the target's, "
        f"{its.get(differing[0])} in its own)"
    )


def _prepared(model: PreTrainedModel, owns_rows: bool) -> _Prepared:
    """``model``'s modules are its own; its weights may be the target's."""
    reference = reference_logits(model)
    shapes = attach_attention(model)
    fuse(model, max_position(model.config))
    return _Prepared(model, reference, shapes if owns_rows else None)


# --- quantised copies ---


def quantized_copy(model: PreTrainedModel, kind: Quantization) -> PreTrainedModel:
    """Returns a copy of ``model`` with quantised linear weights, still on transformers' own attention.
    Everything else is shared; the log says how much memory is new. On CPUs with the instructions ``int8``
    is what ``--quantization int8`` makes of a target; the rest is torchao's.

    Raises ValueError where the machine lacks what ``kind`` needs, DrafterUnavailableError without
    torchao.
    """
    device = model.device
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    if kind == "int8" and refusal(device) is None:
        twin = copy.deepcopy(model, shared)
        quantize_model(twin)
        return twin
    if kind == "fp8" and device.type != "cuda":
        raise ValueError("quantized: fp8 needs a CUDA device")
    try:
        from torchao import quantization
    except ImportError as error:
        raise DrafterUnavailableError(
            "quantized: torchao is not installed (pip install -e '.[quantized]')"
        ) from error
    twin = copy.deepcopy(model, shared)
    quantization.quantize_(twin, _torchao_config(quantization, kind, device))
    known = {id(parameter) for parameter in model.parameters()}
    num_bytes = sum(_num_bytes(each) for each in twin.parameters() if id(each) not in known)
    logger.info("%s copy of the model: %.1f MiB more memory", kind, num_bytes / 2**20)
    return twin


def _torchao_config(quantization: Any, kind: Quantization, device: torch.device) -> Any:
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig()
    if kind == "fp8":
        return quantization.Float8WeightOnlyConfig()
    if device.type == "cuda":
        return quantization.Int4WeightOnlyConfig(
            group_size=_GROUP_SIZE, int4_packing_format="tile_packed_to_4d"
        )
    dtypes: Any = torch
    # torchao has no packed 4-bit product for CPUs: these are unpacked at every call.
    return quantization.IntxWeightOnlyConfig(
        weight_dtype=dtypes.int4, granularity=quantization.PerGroup(_GROUP_SIZE)
    )


def _num_bytes(tensor: Any) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return int(tensor.numel() * tensor.element_size())
    return sum(_num_bytes(getattr(tensor, name)) for name in flatten()[0])
