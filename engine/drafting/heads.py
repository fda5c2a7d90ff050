"""Loads the trained heads that come with a target or that the settings name.

In two parts, as draft models are: folders are read before the target's layers are packed (their
fingerprint is of the weights as they were) and before the KV pool is sized; heads are made when the
target runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from drafters.base import DrafterUnavailableError
from engine.attention.backend import AttentionNeeds, KVShape, build_attention, choose_backend
from engine.capture.replays import graph_sizes
from engine.config import EngineConfig
from engine.drafting import eagle as eagle_head
from engine.drafting import medusa as medusa_heads
from engine.drafting.eagle import EagleModel
from engine.drafting.head_files import (
    HeadFolder,
    HeadsRefusedError,
    TargetFacts,
    read_heads,
    target_facts,
)
from engine.drafting.medusa import MedusaHeads, load_medusa
from engine.model.loader import BUNDLED
from engine.model.runner import ModelRunner
from engine.model.shards import whole_layer

logger = logging.getLogger(__name__)

_SETTINGS = {medusa_heads.KIND: "medusa_heads", eagle_head.KIND: "eagle_head"}


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """The heads of an engine. ``folders``, or the ``reasons`` why there is none, are by kind; ``dtype``
    and ``device`` are the target's. ``ends``: its input and output embeddings, where its own cannot be
    used in one process alone."""

    facts: TargetFacts
    folders: Mapping[str, HeadFolder]
    reasons: Mapping[str, str]
    config: EngineConfig
    dtype: torch.dtype
    device: torch.device
    ends: tuple[nn.Module, nn.Module] | None = None

    def bytes_per_block(self) -> int:
        """Returns the bytes that one more block of the pool costs in the store of the eagle head."""
        folder = self.folders.get(eagle_head.KIND)
        if folder is None:
            return 0
        needs = self._eagle_needs(folder)
        backend = choose_backend(self.config.attention_backend, needs, strict=False)
        return backend.bytes_per_block(needs)

    def medusa(self, runner: ModelRunner) -> MedusaHeads:
        """Raises DrafterUnavailableError with the reason where there are none."""
        folder = self._folder(medusa_heads.KIND)
        return load_medusa(folder, self._ends_of(runner)[1], self.dtype, self.device)

    def eagle(self, runner: ModelRunner) -> EagleModel:
        """Raises DrafterUnavailableError with the reason where there is none."""
        folder = self._folder(eagle_head.KIND)
        layer = eagle_head.load_layer(folder, self.dtype, self.device)
        needs, max_len = self._eagle_needs(folder), layer.sizes["max_position_embeddings"]
        wanted = self.config.attention_backend
        attention = build_attention(needs, runner.store.num_blocks, wanted, strict=False)
        model = EagleModel(
            layer,
            *self._ends_of(runner),
            attention,
            vocab_size=self.facts.vocab_size,
            max_len=max_len,
            max_catch_up_rows=self.config.max_num_batched_tokens,
            graphs=graph_sizes(self.config, attention, max_len, strict=False),
        )
        model.prepare()
        return model

    def _ends_of(self, runner: ModelRunner) -> tuple[nn.Module, nn.Module]:
        return self.ends or _ends(runner.model)

    def _eagle_needs(self, folder: HeadFolder) -> AttentionNeeds:
        num_heads, num_kv_heads, dim = folder.sizes(
            "num_attention_heads", "num_key_value_heads", "head_dim"
        )
        shape = KVShape(num_heads, num_kv_heads, dim, dim)
        return AttentionNeeds("fast", self.device, self.dtype, self.config.block_size, [shape])

    def _folder(self, kind: str) -> HeadFolder:
        if kind not in self.folders:
            raise DrafterUnavailableError(self.reasons[kind])
        return self.folders[kind]


def prepare_heads(target: PreTrainedModel, config: EngineConfig) -> DraftHeads:
    """Read the folders of the settings, or those of the bundled target. ``target`` is not packed yet.

    Of ranks that share the target, all have to prepare them. Raises ValueError naming the setting whose
    folder does not fit; a bundled one that does not fit is left out with a warning.
    """
    facts = target_facts(target)
    folders: dict[str, HeadFolder] = {}
    reasons: dict[str, str] = {}
    for kind, setting in _SETTINGS.items():
        given = getattr(config, setting)
        if config.drafters is not None and kind not in config.drafters:
            reasons[kind] = "it is not among the drafters to load"
        elif given is None and not config.is_bundled:
            reasons[kind] = (
                f"there are no heads for this model; the setting {setting} names a folder"
            )
        else:
            path = BUNDLED / kind if given is None else Path(given)
            try:
                folders[kind] = read_heads(path, kind, facts)
            except HeadsRefusedError as error:
                if given is not None:
                    raise ValueError(f"{setting}: {error}") from error
                logger.warning("no %s drafter: %s", kind, error)
                reasons[kind] = str(error)
    ends = None
    if folders and config.tensor_parallel_size > 1:
        embed, output_head = _ends(target)
        ends = whole_layer(embed), whole_layer(output_head)
    return DraftHeads(facts, folders, reasons, config, target.dtype, target.device, ends)


def _ends(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Input and output embeddings."""
    return model.get_input_embeddings(), model.get_output_embeddings()
