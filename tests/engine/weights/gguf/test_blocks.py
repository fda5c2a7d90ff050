"""Blocks of GGUF files mean what the package gguf, of llama.cpp's own repository, says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import nn

from engine.model.product import GroupedEmbedding
from engine.model.quantization import pack_stored
from engine.weights.gguf.blocks import BLOCK_TYPES, GgufEmbedding, GgufWeight
from engine.weights.layer import embed_scale
from worlds.tiny_models import tiny_model

KINDS = list(BLOCK_TYPES)
OUT, IN = 2056, 512
"""More channels than a part has."""


def any_rows(kind: str, out_features: int = OUT, in_features: int = IN) -> torch.Tensor:
    """Rows of blocks with any bytes but scales that are no number."""
    block = BLOCK_TYPES[kind]
    random = np.random.default_rng(KINDS.index(kind))
    shape = out_features, in_features // block.num_values, block.num_bytes
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    for start in block.halves:
        halves = random.normal(0, 0.01, shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    if not block.halves:  # an exponent
        blocks[..., 0] = random.integers(0, 253, shape[:2])
    return torch.from_numpy(blocks).flatten(1)


def held(kind: str, rows: torch.Tensor, in_features: int = IN) -> GgufWeight:
    weight = GgufWeight(kind, in_features, len(rows), False, torch.bfloat16)
    assert weight.weight.shape == rows.shape
    weight.weight.data = rows
    return weight


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_dequantised_to_the_bit(kind: str) -> None:
    rows = any_rows(kind)
    expected = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
    found = held(kind, rows).dequantized(torch.float32)
    assert torch.equal(found, expected)
    embedding = GgufEmbedding(kind, OUT, IN)
    embedding.weight.data = rows
    assert torch.equal(embedding.dequantized(torch.bfloat16), expected.bfloat16())
    assert (embedding.num_embeddings, embedding.embedding_dim) == (OUT, IN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_its_channels_in_the_ranges_that_are_promised(kind: str) -> None:
    rows = any_rows(kind)
    weight = held(kind, rows)
    part = weight.part(7, 40)
    assert torch.equal(part.dequantized(), weight.dequantized(torch.float32)[7:40])
    assert part.codes.dtype == torch.uint8
    assert int(part.codes.max()) == 2**part.bits - 1
    assert part.scales is not None
    assert part.scales.dtype == (torch.float16 if BLOCK_TYPES[kind].halves else torch.float32)
    assert part.scales.shape == (33, IN // part.span)
    for inner in (part.inner_scales, part.inner_minima):
        assert inner is None or inner.shape == (33, IN // part.inner_span)
    assert part.inner_minima is None or int(part.inner_minima.max()) < 64


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_ggmls(kind: str) -> None:
    block = BLOCK_TYPES[kind]
    assert kind == block.name
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (block.num_values, block.num_bytes)
    weight = held(kind, any_rows(kind, 3))
    assert (weight.scheme, weight.bits) == (block.name, 8 * weight.weight.nbytes / (3 * IN))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_all_that_may_not_be_finite(kind: str) -> None:
    rows = any_rows(kind, 5)
    assert bool(held(kind, rows).block_scales().isfinite().all())
    block = BLOCK_TYPES[kind]
    broken_values = [
        (start, np.array([value], np.float16).view(np.uint8))
        for start in block.halves
        for value in (np.inf, np.nan)
    ]
    for start, octets in broken_values or [(0, np.array([253, 7], np.uint8))]:
        broken = rows.clone()
        at = block.num_bytes + start
        broken[3, at : at + 2] = torch.from_numpy(octets)
        weight = held(kind, broken)
        assert not bool(weight.block_scales().isfinite().all())
        assert not bool(weight.dequantized(torch.float32).isfinite().all())


@torch.inference_mode()
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_NL"])
def test_a_scaled_embedding_keeps_its_blocks_and_the_models_bits(kind: str, packed: bool) -> None:
    model: Any = tiny_model("gemma3", torch.bfloat16)
    own = model.get_input_embeddings()
    scale = embed_scale(own)
    assert scale == 64**0.5  # the hidden size's root
    rows, ids = any_rows(kind, own.num_embeddings, 64), torch.arange(own.num_embeddings)[None]
    values = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
    own.weight.data = values.bfloat16()
    expected = own(ids)
    embedding = GgufEmbedding(kind, own.num_embeddings, 64, scale)
    embedding.weight.data = rows
    model.set_input_embeddings(embedding)
    pack_stored(model, packed)
    found = model.get_input_embeddings()
    assert isinstance(found, GroupedEmbedding) == packed
    assert torch.equal(found(ids), expected)


def test_what_else_embeddings_do_is_no_scale() -> None:
    class Doubled(nn.Embedding):
        scalar_embed_scale = 0.5

        def __init__(self, *sizes: Any) -> None:
            super().__init__(*sizes[:2])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    assert embed_scale(Doubled(3, 2)) is None
    assert embed_scale(nn.Linear(3, 2)) is None
    assert embed_scale(nn.Embedding(3, 2)) == 1
    kind: Any = type(tiny_model("gemma3").get_input_embeddings())
    with torch.device("meta"):  # as models are while places are made
        assert embed_scale(kind(3, 2, None, 8.0)) == 8
