"""Heads of every kind for the tiny target."""

from __future__ import annotations

import torch

from engine.attention.backend import IMPLEMENTATION, AttentionNeeds, KVShape, build_attention
from engine.drafting.draft_model import DraftLimits
from engine.drafting.eagle import EagleModel, FeatureLayer
from engine.drafting.medusa import MedusaHeads, ResidualHeads
from worlds.engine_harness import (
    TINY_VOCAB,
    Setup,
    TinyTarget,
)

TARGET = TinyTarget()


HIDDEN_SIZE = 32


EAGLE_SIZES = (48, 4, 2, 8, 256)


def medusa_heads() -> MedusaHeads:
    """Heads that are often wrong and sometimes right: the next numbers of a circle, roughly."""
    torch.manual_seed(1)
    heads = ResidualHeads(4, 1, HIDDEN_SIZE)
    torch.nn.init.normal_(heads.weight, std=0.2)
    output_head = TARGET.reference.get_output_embeddings()
    return MedusaHeads(heads.requires_grad_(False), output_head, TINY_VOCAB)


def eagle_layer() -> FeatureLayer:
    torch.manual_seed(4)
    layer = FeatureLayer(HIDDEN_SIZE, EAGLE_SIZES, IMPLEMENTATION)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return layer.requires_grad_(False)


def eagle_needs(setup: Setup) -> AttentionNeeds:
    _, num_heads, num_kv_heads, dim, _ = EAGLE_SIZES
    shape = KVShape(num_heads, num_kv_heads, dim, dim)
    return AttentionNeeds("fast", torch.device("cpu"), torch.float32, setup.block_size, [shape])


def eagle_model(layer: torch.nn.Module, setup: Setup) -> EagleModel:
    return EagleModel(
        layer,  # type: ignore[arg-type]  # the oracle's is another module
        TARGET.reference.get_input_embeddings(),
        TARGET.reference.get_output_embeddings(),
        build_attention(eagle_needs(setup), setup.num_blocks),
        DraftLimits(TINY_VOCAB, 256, setup.max_num_batched_tokens),
    )
