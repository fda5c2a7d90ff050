"""Whole drafts of DFlash and DSpark in the engine, against plain readings of the same facts: blocks and
trees, accepted parts, prefix hits, chunks, rests, batches, and the end of the slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.kernels
from drafters.model.heads import DFlashDrafter, DSparkDrafter
from worlds import published_blocks as blocks
from worlds.engine_harness import Setup
from worlds.head_runs import HeadWorld, prompt_of
from worlds.head_schedules import (
    a_long_text_is_run_before_it_drafts,
    no_more_is_drafted_than_was_asked,
    preempted_requests_draft_all_the_same,
    rows_are_caught_up_after_a_rest,
    what_rested_is_run_when_it_leaves,
)
from worlds.plain_heads import PlainBlock, Sizes
from worlds.published_blocks import BLOCK, HIDDEN, LAYER_CONFIG, MASK, PLAIN, SPARK, SPECULATORS

FULL, SLIDING = "full_attention", "sliding_attention"
OPEN: list[tuple[int | None, bool]] = [(None, True)] * blocks.LAYERS
SLIDES = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "use_sliding_window": True}
SLIDING_ROWS = 6
LAYERS = (2, 6, 10)


@dataclass(frozen=True)
class Head:
    """A folder, and how its layers attend."""

    config: dict[str, Any]
    sees: list[tuple[int | None, bool]] = field(default_factory=lambda: OPEN)
    more: dict[str, torch.Tensor] = field(default_factory=dict)
    has_norms: bool = True
    anchor_predicts: bool = False

    @property
    def is_spark(self) -> bool:
        return "markov_head.markov_w1.weight" in self.more


REDUCED = {"draft_vocab_size": blocks.DRAFT_VOCAB}
FEWER = blocks.reduced_vocabulary()
FEWER["lm_head.weight"] *= 0.3  # so that several tokens are likely
SPARK_TENSORS = blocks.spark_tensors(draft_vocab=blocks.DRAFT_VOCAB) | FEWER
HEADS = {
    "dflash": Head(PLAIN),
    "dflash, sliding layers are causal": Head(
        PLAIN | SLIDES, [(SLIDING_ROWS, False), (None, True), (SLIDING_ROWS, False)]
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
Make = Callable[..., HeadWorld]


def block_world(path: Path, head: Head, **changes: Any) -> HeadWorld:
    tensors = blocks.block_tensors(head.has_norms) | head.more
    network = blocks.read_network(path, head.config, tensors)
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
    return HeadWorld(kind, network, reading, HIDDEN, blocks.VOCAB, **changes)


@pytest.fixture(params=HEADS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda **changes: block_world(tmp_path, HEADS[request.param], **changes)


@pytest.fixture(params=["dflash, sliding layers are causal", "dspark"])
def make_few(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda **changes: block_world(tmp_path, HEADS[request.param], **changes)


def prompt(seed: int, count: int = 22) -> list[int]:
    return prompt_of(seed, count, blocks.VOCAB)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("backend", "temperature"), [("sdpa", 0.7), ("paged", 0.0)])
def test_drafts_are_the_readings(make: Make, backend: str, width: int, temperature: float) -> None:
    """In chunks of 5, with parts of drafts accepted between."""
    world = make(backend=backend)
    world.finished(world.ask("r", prompt(1), width=width, temperature=temperature))
    assert world.num_drafts["r"] >= 3
    assert world.num_checked["r"] > 10


@pytest.mark.parametrize("width", [1, 3])
def test_requests_of_a_batch_draft_as_if_alone_one_of_them_after_a_prefix_hit(
    make: Make, width: int
) -> None:
    world = make()
    first = world.ask("first", prompt(1), width=width)
    world.finished(first)
    text = world.text(first)
    follow_up = world.ask("follow-up", [*text, *prompt(2, 3)], width=width)
    others = [world.ask(f"r{at}", prompt(10 + at, 9 + 6 * at), width=width) for at in range(3)]
    world.finished(follow_up, *others)
    assert world.num_cached("follow-up") == (len(text) - 1) // 4 * 4
    assert world.num_together > 1
    assert min(world.num_drafts[each.request_id] for each in (follow_up, *others)) >= 2


def test_a_prefix_hit_drafts_as_often_as_a_miss(make_few: Make) -> None:
    world = make_few()
    miss, hit = world.ask("miss", prompt(1)), world.ask("hit", prompt(1))
    world.finished(miss).finished(hit)
    assert (world.num_cached("miss"), world.num_cached("hit")) == (0, 20)
    assert world.text(miss) == world.text(hit)
    assert world.num_drafts["hit"] == world.num_drafts["miss"]


def test_after_a_rest_rows_are_caught_up_with_the_states_that_came_meanwhile(
    make_few: Make,
) -> None:
    rows_are_caught_up_after_a_rest(make_few, prompt)


def test_what_rested_to_its_end_is_run_when_it_leaves_its_blocks(make_few: Make) -> None:
    what_rested_is_run_when_it_leaves(make_few, prompt)


def test_a_text_of_more_rows_than_wait_is_run_before_it_drafts(make_few: Make) -> None:
    a_long_text_is_run_before_it_drafts(make_few, prompt)


@pytest.mark.parametrize("width", [1, 3])
def test_preempted_requests_draft_as_if_they_had_not_been(make_few: Make, width: int) -> None:
    preempted_requests_draft_all_the_same(make_few, prompt, width)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_fewer_tokens_than_a_block_has(make_few: Make, most: int) -> None:
    """The block is whole all the same: its rows see each other."""
    no_more_is_drafted_than_was_asked(make_few, prompt, most)


@pytest.mark.parametrize("width", [1, 3])
def test_at_the_end_of_the_slots_a_block_has_fewer_masks(make: Make, width: int) -> None:
    world = make(setup=Setup(num_blocks=10, max_model_len=40))
    for at in range(4):
        world.finished(world.ask(f"r{at}", prompt(at, 20 + at), max_tokens=20 - at, width=width))
    assert world.fewest_slots < BLOCK


@pytest.mark.parametrize("width", [1, 3])
def test_chains_run_ahead_of_what_the_host_reads_are_the_same(
    make_few: Make, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: corrections are for tokens that only the device knows."""
    monkeypatch.setattr(engine.kernels, "HOSTS", frozenset())
    world = make_few()
    assert world.model.runs_ahead
    world.finished(world.ask("r", prompt(1), width=width))
    assert world.num_drafts["r"] >= 3
