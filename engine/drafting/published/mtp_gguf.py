"""The MTP module of a target that was read from a GGUF file, in the file's own bits."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import DraftRefusedError
from engine.drafting.published.mtp import layer_config
from engine.drafting.published.mtp_network import Form, MtpNetwork
from engine.model.loader import attach_attention, prepare_model
from engine.model.quantization import has_packed_weights
from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import read_header
from engine.weights.gguf.loading import load_gguf
from engine.weights.gguf.mtp import EMBEDDING, HEAD, PARTS, MtpLayer, is_first_blank

logger = logging.getLogger(__name__)


def read_gguf_mtp(target: PreTrainedModel, path: Path, facts: TargetFacts) -> MtpNetwork:
    """Returns the MTP module of the file that ``target`` was read from, in its type and on its device; it
    is still to be bound. Raises DraftRefusedError where the file has none, or its tensors are not those
    of such a module."""
    try:
        return _read(target, path, facts)
    except UnsupportedModelError as error:
        raise DraftRefusedError(path, f"its MTP module: {error}") from error


def _read(target: PreTrainedModel, path: Path, facts: TargetFacts) -> MtpNetwork:
    layer = MtpLayer(read_header(path), facts.num_layers)
    if layer.count > 1:
        logger.warning("%s has %d MTP modules: the first drafts all tokens", path, layer.count)
    has_experts = any("_exps." in name for name in layer.names)
    config = layer_config(target.config, path, facts, has_experts)
    is_packed = has_packed_weights(target)
    loaded = load_gguf(path, layer.as_model(), config, target.dtype, is_packed)
    prepare_model(loaded, target.device, is_packed)
    form = Form("", PARTS, is_blank_first=is_first_blank(target))
    shapes = attach_attention(loaded)
    embedding, head = (_own_end(target, layer, facts, name) for name in (EMBEDDING, HEAD))
    network = MtpNetwork(loaded.base_model, shapes, form, (embedding, head))
    network.fill(lambda name, shape: layer.values(config, name, shape), target.dtype, target.device)
    return network


def _own_end(
    target: PreTrainedModel, layer: MtpLayer, facts: TargetFacts, name: str
) -> torch.Tensor | None:
    """Returns the weight of the module's own embedding or output head; None: it has none, or the model's
    again."""
    if not layer.has_own(name):
        return None
    shape = facts.vocab_size, facts.hidden_size
    return layer.values(target.config, name, shape).to(target.dtype)
