"""Heads of published forms for SmolLM2 with random weights: nearly all that they draft is wrong."""

from __future__ import annotations

from pathlib import Path

from engine.drafting.facts import TargetFacts
from engine.drafting.published.medusa import ResidualHeads
from training.folders import write_medusa
from worlds.published_blocks import (
    LAYER_CONFIG,
    SPARK,
    SPECULATORS,
    block_tensors,
    draw,
    spark_tensors,
    write_folder,
)
from worlds.published_eagle3 import IDS, Form, written

_SIZE, _VOCAB, _NUM_LAYERS = 576, 49_152, 30
_FACTS = TargetFacts(_SIZE, _VOCAB, _NUM_LAYERS, "f" * 32)
_STATES = [2, 15, 27]
_MASK = 0  # of the text's end, which no text has within
_P_EAGLE = Form(
    method="peagle",
    hidden_size=_SIZE,
    head_dim=64,
    draft_vocab=4096,
    prefix="layers.0.",
    more={IDS: _STATES, "mask_token_id": _MASK},
    facts=_FACTS,
)
_BLOCKS = {
    "transformer_layer_config": LAYER_CONFIG | {"hidden_size": _SIZE, "vocab_size": _VOCAB},
    "draft_vocab_size": _VOCAB,
    "aux_hidden_state_layer_ids": _STATES,
    "mask_token_id": _MASK,
}
RANDOM_HEADS = ("p_eagle", "dflash", "dspark", "medusa")
"""The drafters that they are for."""


def write_random_heads(root: Path) -> dict[str, Path]:
    """Writes a folder for each of ``RANDOM_HEADS``."""
    written(root / "p_eagle", _P_EAGLE)
    blocks = block_tensors(size=_SIZE)
    spark = blocks | spark_tensors(_VOCAB, vocab=_VOCAB, size=_SIZE)
    write_folder(root / "dflash", SPECULATORS | _BLOCKS, blocks)
    write_folder(root / "dspark", SPARK | _BLOCKS, spark)
    heads = ResidualHeads(num_heads=3, num_layers=1, hidden_size=_SIZE)
    heads.weight.data = 0.02 * draw(500, *heads.weight.shape)
    write_medusa(root / "medusa", heads, _FACTS, {"target_fingerprint": None})
    return {name: root / name for name in RANDOM_HEADS}
