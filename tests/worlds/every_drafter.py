"""A tiny target with every drafter there is: models, copies, layers and heads of its own size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from drafters.base import DrafterContext
from drafters.registry import build_drafters, drafter_names
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.drafting.drafts import SMALL_MODEL, Draft, find_drafts
from engine.drafting.heads import prepare_heads
from engine.drafting.models import DraftModels, prepare_drafts
from engine.model.loader import prepare_model
from worlds.engine_harness import (
    TINY_VOCAB,
    DictatedCost,
    Setup,
    TinyTarget,
    build_core,
    circle_prompt,
    tiny_llama,
)
from worlds.grammar_world import EOS, tiny_compiler
from worlds.trained_heads import BLOCK_CONFIGS, EAGLE3_FORMS, write_checkpoint, write_heads

MAX_LEN = 256
DRAFTERS = tuple(dict.fromkeys((*drafter_names(), *EAGLE3_FORMS, *BLOCK_CONFIGS)))
"""Those of the registry, and further ones over drafts of the same methods in other forms."""


class _Source(NamedTuple):
    """Models that the drafts of engines with blocks of one size are made of."""

    target: PreTrainedModel
    models: DraftModels


class EveryDrafterTarget(TinyTarget):
    """``TinyTarget`` whose cores have ``DRAFTERS``: the small model is the target with noise on its
    weights, the quantised copy has 8-bit weights, one of the two layers drafts, heads are those of
    ``trained_heads``. ``folder``: where to save them. ``setup`` takes grammars, too."""

    prompts = [circle_prompt(index) for index in range(4)]
    setup = Setup(
        max_num_seqs=32,
        max_num_batched_tokens=256,
        cost=DictatedCost(row_seconds=0.001),
        eos_token_ids=(EOS,),
        constrain=tiny_compiler().constraint,
    )

    def __init__(self, folder: Path, make: Callable[[], PreTrainedModel] = tiny_llama) -> None:
        """``make`` as ``TinyTarget`` takes it."""
        super().__init__(make)
        small = folder / "small"
        _near(make()).save_pretrained(small)
        heads = write_heads(folder)
        self._config = EngineConfig(
            model=str(write_checkpoint(folder / "target", make())),
            draft=(str(small), "mtp", *(f"{name}={path}" for name, path in heads.items())),
            quantized="int8",
            prefix_layers="1",
        )
        self._found: Mapping[str, Draft] = find_drafts(self._config)
        self._sources: dict[int, _Source] = {}

    def core(self, setup: Setup) -> EngineCore:
        config = replace(
            self._config,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
        )
        source = self._source(config)
        setup = self._with_states(setup)
        runner = self._runner(setup)
        source.models.attach(runner, self._shapes, TINY_VOCAB, MAX_LEN, setup.states)
        heads = prepare_heads(source.target, config, self._found)

        # Drafters that ask for something else are not built: then this has to learn to lend it.
        def draft_model(name: str) -> Any:
            is_head = name in self._found and self._found[name].method != SMALL_MODEL
            return heads.load(name, runner, MAX_LEN) if is_head else source.models.get(name)

        context = DrafterContext(TINY_VOCAB, draft_model=draft_model)
        methods = {name: draft.method for name, draft in self._found.items()}
        drafters = build_drafters(None, context, drafts=methods)
        return build_core(runner, TINY_VOCAB, setup.but(drafters=drafters))

    def _source(self, config: EngineConfig) -> _Source:
        if config.block_size not in self._sources:
            target = prepare_model(self._make(), torch.device("cpu"))
            models = prepare_drafts(target, None, config, self._found)
            self._sources[config.block_size] = _Source(target, models)
        return self._sources[config.block_size]


@torch.no_grad()
def _near(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.add_(0.03 * weight.std() * torch.randn(weight.shape, generator=generator))
    return model
