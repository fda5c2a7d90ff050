"""The target: loaded, quantized where that is asked for, and with linear layers and attention as the
engine runs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from engine.attention.backend import (
    AttentionNeeds,
    KVShape,
    build_attention,
    stored_dtype,
)
from engine.build.sizes import wanted_len
from engine.config import EngineConfig
from engine.drafting.drafts import Draft, find_drafts
from engine.drafting.heads import DraftHeads, prepare_heads
from engine.drafting.models import DraftModels, prepare_drafts
from engine.logs import log_through_root
from engine.machine import can_pack
from engine.model.calibration.sequence import quantize_4_bits
from engine.model.calibration.texts import CALIBRATION_TOKENS, calibration_texts
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.loader import attach_attention, eos_token_ids, load_model, state_shapes
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
from engine.model.runner import ModelRunner
from engine.model.selfcheck import blocks_needed, check_logits, reference_logits
from engine.offload.identity import weights_digest
from engine.ranks.group import Ranks
from engine.request.errors import UnsupportedModelError
from engine.request.info import Determinism, QuantizationInfo
from engine.states.build import checked_states
from engine.weights.rounding.int8 import is_exact

logger = logging.getLogger(__name__)


def load_target(config: EngineConfig, ranks: Ranks | None) -> PreTrainedModel:
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


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is ready to be run, and what is known of it. ``ranks``: those that it is divided
    among. ``reference``: the logits that transformers itself gave it, ``failures``: the projections that
    could not be packed; ``weights``: a digest of its weights, where blocks of other starts are read.
    ``drafts`` and ``heads``: the models and heads that draft for it, as ``found`` names them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: EngineConfig
    ranks: Ranks | None
    determinism: Determinism
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    reference: torch.Tensor
    weights: str
    quantization: QuantizationInfo | None
    shapes: list[KVShape]
    failures: set[str]
    found: dict[str, Draft]
    drafts: DraftModels
    heads: DraftHeads

    @property
    def draft_bytes(self) -> int:
        """The bytes of a KV block in the stores of draft models and heads."""
        return self.drafts.bytes_per_block() + self.heads.bytes_per_block()

    @property
    def needs(self) -> AttentionNeeds:
        return attention_needs(self.model, self.shapes, self.determinism, self.config)


def prepare_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    ranks: Ranks | None,
) -> Target:
    """Makes ``model`` the engine's own. Raises UnsupportedModelError."""
    # Exact where it was shown to be reachable.
    usual: Determinism = "exact" if model.device.type == "cpu" and ranks is None else "fast"
    determinism = config.determinism or usual
    num_weights = num_parameters(model)
    # Heads read the model's parts, and its logits are compared, before its weights are changed.
    found = find_drafts(config)
    heads = prepare_heads(model, config, found)
    reference = reference_logits(model)
    weights = "" if config.kv_offload_file is None else weights_digest(model)
    quantization = _quantize(model, tokenizer, reference, config)
    # A draft may be a copy of the target as it is now.
    drafts = prepare_drafts(model, tokenizer, config, found)
    shapes = attach_attention(model)
    is_exact_wanted, failures = determinism == "exact", set[str]()
    if ranks is None and (is_exact_wanted or can_pack(model.device, model.dtype)):
        failures = pack_linears(model, config.max_num_batched_tokens, is_exact_wanted)
    fuse(model, wanted_len(model, config))
    return Target(
        model,
        tokenizer,
        config,
        ranks,
        determinism,
        num_weights,
        eos_token_ids(model, tokenizer),
        heads.facts.vocab_size,
        reference,
        weights,
        quantization,
        shapes,
        failures,
        found,
        drafts,
        heads,
    )


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
    needs = replace(attention_needs(model, shapes, "fast", config), kv_dtype=None)
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


def attention_needs(
    model: PreTrainedModel, shapes: list[KVShape], determinism: Determinism, config: EngineConfig
) -> AttentionNeeds:
    kv_dtype = stored_dtype(config.kv_cache_dtype)
    return AttentionNeeds.of(model, shapes, determinism, config.block_size, kv_dtype)
