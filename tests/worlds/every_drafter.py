"""A tiny target with every drafter there is: models, copies, layers and heads of its own size."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from drafters.base import DrafterContext
from drafters.registry import build_drafters
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.drafting.models import prepare_drafts
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
from worlds.trained_heads import eagle_layer, eagle_model, medusa_heads

MAX_LEN = 256


class EveryDrafterTarget(TinyTarget):
    """``TinyTarget`` whose cores have all drafters of the registry: the small model is the target with
    noise on its weights, the quantised copy has 8-bit weights, one of the two layers drafts, heads are
    random. ``folder``: where to save the small model. ``setup`` takes grammars, too."""

    prompts = [circle_prompt(index) for index in range(4)]
    setup = Setup(
        max_num_seqs=32,
        max_num_batched_tokens=256,
        cost=DictatedCost(row_seconds=0.001),
        eos_token_ids=(EOS,),
        constrain=tiny_compiler().constraint,
    )

    def __init__(self, folder: Path) -> None:
        super().__init__()
        _near_target().save_pretrained(folder)
        config = EngineConfig(draft_model=str(folder), quantized="int8", prefix_layers="1")
        source = prepare_model(tiny_llama(), torch.device("cpu"))
        self._drafts = prepare_drafts(source, None, config)

    def core(self, setup: Setup) -> EngineCore:
        runner = self._runner(setup)
        self._drafts.attach(runner, self._shapes, TINY_VOCAB, MAX_LEN)
        # Drafters that ask for something else are not built: then this has to learn to lend it.
        context = DrafterContext(
            TINY_VOCAB,
            draft_model=self._drafts.get,
            medusa_heads=medusa_heads,
            eagle_head=lambda: eagle_model(eagle_layer(), setup),
        )
        drafters = build_drafters(None, context)
        return build_core(runner, TINY_VOCAB, setup.but(drafters=drafters))


@torch.no_grad()
def _near_target() -> PreTrainedModel:
    model = tiny_llama()
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.add_(0.03 * weight.std() * torch.randn(weight.shape, generator=generator))
    return model
