"""The heads of one engine, by the names of their drafters.

Heads are made in two parts, as draft models are: folders are read before the target's layers are packed
(a fingerprint is of the weights as they were) and before the KV pool is sized (``prepare_heads``); heads
are made to run when the target does (``DraftHeads.load``). Several may serve one target, each under the
name of its drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from drafters.base import DrafterUnavailableError
from engine.attention.backend import AttentionNeeds, build_attention, choose_backend
from engine.capture.replays import graph_sizes
from engine.config import EngineConfig
from engine.drafting.block_model import BlockHead
from engine.drafting.draft_model import DraftLimits
from engine.drafting.drafts import MTP, SMALL_MODEL, Draft
from engine.drafting.facts import TargetFacts, target_facts
from engine.drafting.head_model import ChainHead, HeadModel
from engine.drafting.medusa import MedusaHeads
from engine.drafting.published.folder import DraftRefusedError
from engine.drafting.published.methods import brings_mtp, read_network
from engine.drafting.published.networks import place
from engine.machine import can_pack
from engine.model.fusing import fuse
from engine.model.layers import is_plain
from engine.model.linear import pack_linears
from engine.model.quantization import (
    has_packed_weights,
    num_parameters,
    quantize_linears,
    round_inputs,
    rounds_inputs,
    share_named,
    usual_bits,
)
from engine.model.runner import ModelRunner
from engine.names import locate
from engine.weights.shards import whole_layer

logger = logging.getLogger(__name__)

_LEAST_FEATURES = 64
"""Layers with fewer outputs have next to no weights."""
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read one input, by the names that transformers gives them."""
NO_HEAD = "there is no draft for it; the setting draft names one"


@dataclass(slots=True)
class DraftHeads:
    """The loaded heads. ``networks``, or the ``reasons`` for their absence, are by drafter name;
    ``dtype`` and ``device`` are the target's. ``ends``: its input and output embeddings, if its own
    cannot be used in one process alone."""

    facts: TargetFacts
    networks: Mapping[str, Any]
    reasons: Mapping[str, str]
    config: EngineConfig
    dtype: torch.dtype
    device: torch.device
    ends: tuple[nn.Module, nn.Module] | None = None
    sizes: dict[str, int] = field(init=False)
    """Parameters that heads have of their own, by the names of drafters."""
    _loaded: dict[str, HeadModel | MedusaHeads] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = {name: num_parameters(network) for name, network in self.networks.items()}

    def bytes_per_block(self) -> int:
        """Returns the bytes that one more block of the pool costs: in the stores of all heads, and for
        the states that are kept behind blocks."""
        total = 0
        for network in (each for each in self.networks.values() if each.shapes):
            needs = self._needs(network)
            backend = choose_backend(self.config.attention_backend, needs, strict=False)
            state = len(network.hidden_layers) * self.facts.hidden_size * self.dtype.itemsize
            total += backend.bytes_per_block(needs) + state
        return total

    def load(self, name: str, runner: ModelRunner, max_model_len: int) -> HeadModel | MedusaHeads:
        """Returns a drafter's head, over the runner's model; made once. Raises DrafterUnavailableError
        with the reason where there is none."""
        if name not in self.networks:
            raise DrafterUnavailableError(self.reasons.get(name, NO_HEAD))
        if name not in self._loaded:
            self._loaded[name] = self._load(self.networks[name], runner, max_model_len)
        return self._loaded[name]

    def _load(
        self, network: Any, runner: ModelRunner, max_model_len: int
    ) -> HeadModel | MedusaHeads:
        place(network, self.device, self.dtype)
        network.bind(*(self.ends or _ends(runner.model)))
        if not network.shapes:
            return MedusaHeads(network)
        if has_packed_weights(runner.model):
            quantize_head(network, runner.model)
        if can_pack(self.device, self.dtype):
            pack_linears(network, self.config.max_num_batched_tokens, exact=False)
        # The rows of a block may lie behind the longest text.
        fuse(network, max_model_len + getattr(network, "block_size", 0))
        config = self.config
        attention = build_attention(
            self._needs(network), runner.store.num_blocks, config.attention_backend, strict=False
        )
        # Positions turn keys and queries alike, whatever length a head was trained for.
        limits = DraftLimits(self.facts.vocab_size, max_model_len, config.max_num_batched_tokens)
        if hasattr(network, "block_size"):
            return BlockHead(network, attention, limits)
        graphs = graph_sizes(config, attention, max_model_len, strict=False)
        head = ChainHead(network, attention, limits, graphs)
        head.prepare()
        return head

    def _needs(self, network: Any) -> AttentionNeeds:
        return AttentionNeeds(
            "fast", self.device, self.dtype, self.config.block_size, network.shapes
        )


def prepare_heads(
    target: PreTrainedModel, config: EngineConfig, drafts: Mapping[str, Draft]
) -> DraftHeads:
    """Reads the folders of those drafts that are heads. ``target`` is not packed yet.

    Of ranks that share the target, all have to prepare them. Raises ValueError naming the draft whose
    folder does not fit; a bundled one that does not fit is left out with a warning.
    """
    facts = target_facts(target)
    networks: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, draft in drafts.items():
        if draft.method == SMALL_MODEL:
            continue
        try:
            is_own = draft.path == MTP
            path = Path(locate(config.served_model, config.revision) if is_own else draft.path)
            networks[name] = read_network(draft.method, path, facts, target)
        except DraftRefusedError as error:
            if not draft.is_bundled:
                raise ValueError(f"draft {name}: {error}") from error
            logger.warning("no %s drafter: %s", name, error)
            reasons[name] = str(error)
    _tell_mtp(config, drafts, facts.num_layers)
    ends = None
    if networks and config.tensor_parallel_size > 1:
        embed, output_head = _ends(target)
        ends = whole_layer(embed), whole_layer(output_head)
    return DraftHeads(facts, networks, reasons, config, target.dtype, target.device, ends)


def _tell_mtp(config: EngineConfig, drafts: Mapping[str, Draft], num_layers: int) -> None:
    """Says that the checkpoint brings a draft that the settings do not use."""
    if any(each.method == MTP for each in drafts.values()):
        return
    if brings_mtp(Path(locate(config.served_model, config.revision)), num_layers):
        logger.info("the model brings a multi-token-prediction layer: --draft mtp drafts with it")


def quantize_head(network: nn.Module, target: PreTrainedModel) -> None:
    """A head costs reading its weights, as its target does; and a draft that is wrong once more often
    costs less than the bytes. The output layer keeps 8 bits: in 4 it alone loses about as many drafts as
    all the rest. What it makes is float32, as choosing wants it."""
    large = [
        name
        for name, each in network.named_modules()
        if is_plain(each) and each.out_features >= _LEAST_FEATURES
    ]
    ends = [name for name in large if name == "lm_head"]
    method = "int4" if usual_bits(target) <= 4 else "int8"
    quantize_linears(network, [name for name in large if name not in ends], target.dtype, method)
    quantize_linears(network, ends, torch.float32)
    # Keys and values of a block's context have no queries beside them.
    reads_context = hasattr(network, "block_size")
    share_named(network, _SIBLINGS[1:] if reads_context else _SIBLINGS)
    round_inputs(network, rounds_inputs(target))


def _ends(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()
