"""Whole drafts of DFlash and DSpark in the engine, against plain readings of the same facts: blocks and
trees, accepted parts, prefix hits, chunks, rests, batches, and the end of the slots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.model.heads import DFlashDrafter, DSparkDrafter
from worlds import published_blocks as blocks
from worlds.engine_harness import Setup
from worlds.head_runs import HeadWorld
from worlds.head_schedules import HeadSchedules, Make, both_widths
from worlds.plain_heads import PlainBlock, Sizes
from worlds.published_blocks import BLOCK, HIDDEN, LAYER_CONFIG, MASK, PLAIN, SPARK, SPECULATORS

FULL, SLIDING = "full_attention", "sliding_attention"
OPEN: list[tuple[int | None, bool]] = [(None, True)] * blocks.LAYERS
SLIDES = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "use_sliding_window": True}
SLIDING_ROWS = 6
LAYERS = (2, 6, 10)


@dataclass(frozen=True)
class Head:
    """A folder, how its layers attend, and the size of its target's states."""

    config: dict[str, Any]
    sees: list[tuple[int | None, bool]] = field(default_factory=lambda: OPEN)
    more: dict[str, torch.Tensor] = field(default_factory=dict)
    has_norms: bool = True
    anchor_predicts: bool = False
    target_size: int = HIDDEN

    @property
    def is_spark(self) -> bool:
        return "markov_head.markov_w1.weight" in self.more


REDUCED = {"draft_vocab_size": blocks.DRAFT_VOCAB}
FEWER = blocks.reduced_vocabulary()
FEWER["lm_head.weight"] *= 0.3  # so that several tokens are likely
OWN_ENDS = {
    "embed_tokens.weight": blocks.draw(321, blocks.VOCAB, HIDDEN),
    "lm_head.weight": blocks.draw(322, blocks.VOCAB, HIDDEN),
}
NESTED = PLAIN["dflash_config"]
SPARK_TENSORS = blocks.spark_tensors(draft_vocab=blocks.DRAFT_VOCAB) | FEWER
HEADS = {
    "dflash": Head(PLAIN),
    "dflash, sliding layers are causal": Head(
        PLAIN | SLIDES, [(SLIDING_ROWS, False), (None, True), (SLIDING_ROWS, False)]
    ),
    "dflash, none is causal": Head(
        PLAIN | SLIDES | {"dflash_config": NESTED | {"causal": False}},
        [(SLIDING_ROWS, True), (None, True), (SLIDING_ROWS, True)],
    ),
    "dflash, all are causal": Head(PLAIN | {"is_causal": True}, [(None, False)] * blocks.LAYERS),
    "dflash, all slide": Head(
        PLAIN | {"dflash_config": NESTED | {"use_swa": True, "swa_window_size": 7}},
        [(7, True)] * blocks.LAYERS,
    ),
    "dflash, another width and ends of its own": Head(
        SPECULATORS | {"target_hidden_size": 20},
        more=OWN_ENDS | {"fc.weight": 0.2 * blocks.draw(320, HIDDEN, 3 * 20)},
        target_size=20,
    ),
    "dflash, speculators": Head(SPECULATORS | REDUCED, more=FEWER),
    "dflash, speculators, sliding layers see the block": Head(
        SPECULATORS
        | {"transformer_layer_config": LAYER_CONFIG | SLIDES, "sliding_window_non_causal": True},
        [(SLIDING_ROWS, True), (None, True), (SLIDING_ROWS, True)],
    ),
    "dflash, the anchor predicts": Head(
        SPECULATORS
        | {
            "sample_from_anchor": True,
            "transformer_layer_config": LAYER_CONFIG | {"model_type": "llama"},
        },
        has_norms=False,
        anchor_predicts=True,
    ),
    "dspark": Head(SPARK | REDUCED, more=SPARK_TENSORS, anchor_predicts=True),
    "dspark, without confidences": Head(
        SPARK | REDUCED | {"sample_from_anchor": False},
        more={name: each for name, each in SPARK_TENSORS.items() if "confidence" not in name},
    ),
    "dspark, confidences of states alone": Head(
        SPARK, more=blocks.spark_tensors(reads_markov=False, has_bias=False), anchor_predicts=True
    ),
}


def block_world(path: Path, head: Head, **changes: Any) -> HeadWorld:
    tensors = blocks.block_tensors(head.has_norms) | head.more
    facts = replace(blocks.FACTS, hidden_size=head.target_size)
    network = blocks.read_network(path, head.config, tensors, facts)
    assert network.hidden_layers == LAYERS
    ends = blocks.Ends()
    reading = PlainBlock(
        tensors,
        LAYERS,
        Sizes(blocks.HEADS, blocks.KV_HEADS, blocks.DIM, 500.0),
        (ends.embed.weight, ends.output_head.weight),
        head.sees,
        BLOCK,
        MASK,
        head.anchor_predicts,
    )
    kind = DSparkDrafter if head.is_spark else DFlashDrafter
    return HeadWorld(kind, network, reading, head.target_size, blocks.VOCAB, **changes)


@pytest.fixture(params=HEADS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda **changes: block_world(tmp_path, HEADS[request.param], **changes)


@pytest.fixture(params=["dflash, sliding layers are causal", "dspark"])
def make_few(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda **changes: block_world(tmp_path, HEADS[request.param], **changes)


class TestBlocks(HeadSchedules):
    vocab_size = blocks.VOCAB
    fewest_drafts = 3

    @both_widths
    def test_at_the_end_of_the_slots_a_block_has_fewer_masks(self, make: Make, width: int) -> None:
        world = make(setup=Setup(num_blocks=10, max_model_len=40))
        for at in range(4):
            prompt = self.prompt(at, 20 + at)
            world.finished(world.ask(f"r{at}", prompt, max_tokens=20 - at, width=width))
        assert world.fewest_slots < BLOCK
