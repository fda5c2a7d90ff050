"""Facts about an engine's drafts known before the first request: their sizes, and how well they fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from engine.batch import NORMED
from engine.config import EngineConfig
from engine.drafting.agreement import (
    OwnText,
    agreement,
    agreement_of_medusa,
    best_reading,
    write_texts,
)
from engine.drafting.draft_model import LevelModel
from engine.drafting.drafts import SMALL_MODEL, Draft
from engine.drafting.head_model import HeadModel
from engine.drafting.heads import DraftHeads
from engine.drafting.models import DraftModels
from engine.hub.name import called
from engine.model.calibration.texts import beginnings
from engine.model.runner import ModelRunner
from engine.request.errors import UnsupportedModelError
from engine.request.info import DraftInfo

logger = logging.getLogger(__name__)

_LOW = 0.2
"""Drafts that agree less cost more than they bring, and usually are another model's."""


def check_drafts(
    drafts: Mapping[str, Draft],
    models: DraftModels,
    heads: DraftHeads,
    runner: ModelRunner,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    max_model_len: int,
) -> dict[str, DraftInfo]:
    """Returns what is known of each draft, by the name of its drafter, and says it in the log. Heads read
    the layers from then on with which they agree most. Only while the stores are unused.

    Raises UnsupportedModelError for a draft that agrees less than the setting ``min_draft_agreement``.
    """
    loaded: dict[str, Any] = {}
    for name, draft in drafts.items():
        if draft.method == SMALL_MODEL and models.has(name):
            loaded[name] = models.get(name)
        elif name in heads.networks:
            loaded[name] = heads.load(name, runner, max_model_len)
    if not loaded:
        return {}
    texts = write_texts(runner, _prompts(tokenizer, heads.facts.vocab_size), _layers(loaded))
    found: dict[str, DraftInfo] = {}
    for name, model in loaded.items():
        draft = drafts[name]
        is_model = draft.method == SMALL_MODEL
        size = models.num_parameters(name) if is_model else heads.sizes[name]
        layers, share, note = _fit(model, texts)
        info = DraftInfo(name, draft.method, called(draft.path), size, layers, share, note)
        _judge(info, config.min_draft_agreement)
        found[name] = info
    return found


def _fit(model: Any, texts: list[OwnText]) -> tuple[tuple[int, ...], float | None, str]:
    """Returns the layers that are read, the agreement, and what else there is to say."""
    if isinstance(model, HeadModel):
        layers, share = best_reading(model, texts)
        given = model.candidate_layers[0]
        note = f"its file names {list(given)}" if layers != given else ""
        return layers, share, note
    if isinstance(model, LevelModel):
        return (), agreement(model, texts), ""
    return (NORMED,), agreement_of_medusa(model, texts), ""


def _judge(info: DraftInfo, floor: float | None) -> None:
    said = "not checked" if info.agreement is None else f"{info.agreement:.0%} agreement"
    reads = f", reads layers {list(info.hidden_layers)}" if info.hidden_layers else ""
    more = f" ({info.note})" if info.note else ""
    size = f"{info.num_parameters / 1e6:.1f} million parameters"
    logger.info("draft %s: %s of %s, %s%s%s", info.name, info.method, size, said, reads, more)
    if info.agreement is None or info.agreement >= (_LOW if floor is None else floor):
        return
    fault = (
        f"draft {info.name}: on the target's own text its first guess is right in "
        f"{info.agreement:.0%} of all places; is it another model's?"
    )
    if floor is not None:
        raise UnsupportedModelError(f"{fault} (min_draft_agreement is {floor:g})")
    logger.warning("%s", fault)


def _layers(loaded: Mapping[str, Any]) -> list[int]:
    """Returns all layers that any of the heads may read."""
    layers = {NORMED}
    for model in loaded.values():
        if isinstance(model, HeadModel):
            layers.update(layer for each in model.candidate_layers for layer in each)
    return sorted(layers)


def _prompts(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[list[int]]:
    """Returns beginnings of texts of several kinds; requests first where the model takes them."""
    if tokenizer is None:
        return [[(1 + 7 * at) % vocab_size] for at in range(8)]
    return sorted(beginnings(tokenizer), key=len, reverse=True)
