"""DFlash's and DSpark's folders: what is read of them, what is recognised, and what is refused. What they
compute is compared with a plain reading in ``test_block_model.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafting.facts import TargetFacts
from engine.drafting.published.dflash import read, recognised, spread_layers
from engine.drafting.published.folder import DraftRefusedError
from engine.drafting.published.networks import place
from worlds import published_blocks as blocks
from worlds.published_blocks import (
    BLOCK,
    FACTS,
    HIDDEN,
    LAYER_CONFIG,
    LAYERS,
    MASK,
    PLAIN,
    SPARK,
    SPECULATORS,
    VOCAB,
    Tensors,
    block_tensors,
    draw,
    read_network,
    reduced_vocabulary,
    spark_tensors,
    write_folder,
)

FULL, SLIDING = "full_attention", "sliding_attention"
NESTED = PLAIN["dflash_config"]
STATES = draw(500, 2, 3 * HIDDEN)


def test_the_same_vocabulary_needs_no_map(tmp_path: Path) -> None:
    same = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    for name, tensors in (("none", {}), ("same", same)):
        network = read_network(tmp_path / name, SPECULATORS, block_tensors() | tensors)
        assert network.token_map is None


SPARK_AT_THE_TOP = LAYER_CONFIG | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 5, 9],
}


@pytest.mark.parametrize(
    ("config", "tensors", "predicts"),
    [
        (PLAIN, {}, False),
        (SPECULATORS, {}, False),
        (SPECULATORS | {"sample_from_anchor": True}, {}, True),
        (SPARK, spark_tensors(), True),
        (SPARK | {"sample_from_anchor": False}, spark_tensors(), False),
        (SPARK_AT_THE_TOP, spark_tensors(), True),
    ],
)
def test_the_anchors_row_predicts_where_the_format_says_so(
    config: dict[str, Any], tensors: Tensors, predicts: bool, tmp_path: Path
) -> None:
    network = read_network(tmp_path, config, block_tensors() | tensors)
    assert network.anchor_predicts is predicts


@pytest.mark.parametrize(
    ("config", "candidates"),
    [
        (PLAIN, [(2, 6, 10), (1, 5, 9)]),
        (SPARK_AT_THE_TOP, [(2, 6, 10), (1, 5, 9)]),
        (SPECULATORS, [(2, 6, 10), (3, 7, 11)]),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [2, 6, 12]}, [(2, 6, 12)]),
        (SPECULATORS | {"aux_hidden_state_layer_ids": None}, [(2, 6, 9), (3, 7, 10)]),
        (PLAIN | {"dflash_config": {"mask_token_id": MASK}}, [(2, 6, 10), (1, 5, 9)]),
    ],
)
def test_layers_are_counted_as_the_format_does_and_the_neighbours_follow(
    config: dict[str, Any], candidates: list[tuple[int, ...]], tmp_path: Path
) -> None:
    network = read_network(tmp_path, config, block_tensors())
    assert network.candidate_layers == tuple(candidates)
    assert network.hidden_layers == candidates[0]


def test_missing_layers_are_spread_over_the_target() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(28, 4) == (1, 9, 17, 25)
    assert spread_layers(28, 1) == (14,)


def test_the_block_size_stands_in_either_place(tmp_path: Path) -> None:
    config = {key: value for key, value in PLAIN.items() if key != "block_size"}
    config["dflash_config"] = NESTED | {"block_size": 7}
    assert read_network(tmp_path / "nested", config, block_tensors()).block_size == 7
    assert read_network(tmp_path / "top", PLAIN, block_tensors()).block_size == BLOCK


def test_facts_for_the_engine(tmp_path: Path) -> None:
    network = read_network(tmp_path, PLAIN, block_tensors())
    assert [tuple(shape) for shape in map(_sizes, network.shapes)] == [(4, 2, 8, 8)] * LAYERS
    assert (network.max_len, network.mask_token_id) == (512, MASK)


def _sizes(shape: Any) -> tuple[int, ...]:
    return shape.num_heads, shape.num_kv_heads, shape.key_dim, shape.value_dim


def test_in_16_bits_later_positions_are_turned_as_far(tmp_path: Path) -> None:
    network = read_network(tmp_path, PLAIN, block_tensors())
    exact = network.context(STATES[:1], torch.tensor([400]))[0][0]
    place(network, torch.device("cpu"), torch.bfloat16)
    rounded = network.context(STATES[:1].bfloat16(), torch.tensor([400]))[0][0]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.1, rtol=0.05)


def test_rotary_embeddings_are_scaled_as_the_folder_says(tmp_path: Path) -> None:
    scaled = PLAIN | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    networks = [
        read_network(tmp_path / name, config, block_tensors())
        for name, config in (("plain", PLAIN), ("scaled", scaled))
    ]
    contexts = [
        network.context(STATES, torch.tensor(positions))
        for network, positions in zip(networks, ([2, 5], [8, 20]), strict=True)
    ]
    for (keys, _), (scaled_keys, _) in zip(*contexts, strict=True):
        torch.testing.assert_close(scaled_keys, keys, atol=1e-5, rtol=1e-5)


def test_reading_leaves_the_configuration_as_it_was(tmp_path: Path) -> None:
    """transformers completes what it is given, in place."""
    parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 500.0}
    config = PLAIN | {"rope_parameters": parameters}
    folder = write_folder(tmp_path, config, block_tensors())
    read(folder, FACTS)
    assert folder.config["rope_parameters"] == parameters


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        (PLAIN, ["fc.weight"], "dflash"),
        (SPARK_AT_THE_TOP, ["hidden_norm.weight", "markov_head.markov_w1.weight"], "dspark"),
        (SPECULATORS, [], "dflash"),
        (SPARK, [], "dspark"),
        ({"speculators_model_type": "dflash2"}, [], "dflash"),
        ({"speculators_model_type": "eagle3"}, ["hidden_norm.weight"], None),
        ({"model_type": "llama"}, ["fc.weight", "midlayer.hidden_norm.weight"], None),
    ],
)
def test_folders_of_the_kind_are_recognised(
    config: dict[str, Any], names: list[str], expected: str | None
) -> None:
    assert recognised(config, names) == expected


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: each for key, each in tensors.items() if key != name}


def _with(**others: torch.Tensor) -> Callable[[Tensors], Tensors]:
    named = {name.replace("__", "."): each for name, each in others.items()}
    return lambda tensors: tensors | named


def _nested(**keys: Any) -> dict[str, Any]:
    return PLAIN | {"dflash_config": NESTED | keys}


def _layers(**keys: Any) -> dict[str, Any]:
    return SPECULATORS | {"transformer_layer_config": LAYER_CONFIG | keys}


SMALL = SPECULATORS | {"draft_vocab_size": blocks.DRAFT_VOCAB}
REDUCED = reduced_vocabulary()
FEWER = {"lm_head.weight": REDUCED["lm_head.weight"]}
TWICE = REDUCED["d2t"].clone()
TWICE[1] = -1
FAR = REDUCED["d2t"].clone()
FAR[-1] = VOCAB
# By what the refusal says.
CONFIGS: dict[str, dict[str, Any]] = {
    "layers.0.mlp.gate_proj.weight [48, 32] instead of [64, 32]": _layers(intermediate_size=64),
    "num_hidden_layers is 2, and tensors are of 3": _layers(num_hidden_layers=2),
    "fc.weight [32, 96] instead of [32, 64]": _nested(target_layer_ids=[1, 5]),
    "config.json has unknown keys: dflash_config.selector_rank": _nested(selector_rank=4),
    "vocab_size is 100, and this model has 96": PLAIN | {"vocab_size": 100},
    "draft_vocab_size is 97, and this model has 96": SPECULATORS | {"draft_vocab_size": 97},
    "target_hidden_size is 64, and this model has 32": SPECULATORS | {"target_hidden_size": 64},
    "num_target_layers is 36, and this model has 12": PLAIN | {"num_target_layers": 36},
    "block_size is 1, and a block has at least 2 rows": PLAIN | {"block_size": 1},
    "block_size is None, not a positive whole number": PLAIN | {"block_size": None},
    "dflash_config.target_layer_ids names layers 1, 5, 12, and this model has 12": _nested(
        target_layer_ids=[1, 5, 12]
    ),
    "aux_hidden_state_layer_ids names layers -1, 5, 9, and this model has 12": SPECULATORS
    | {"aux_hidden_state_layer_ids": [-1, 5, 9]},
    "dflash_config.mask_token_id is 96, not a token of the target's 96": _nested(mask_token_id=96),
    "mask_token_id is None, not a token of the target's 96": SPECULATORS | {"mask_token_id": None},
    "dflash2's convolutions and selector are not read": SPECULATORS
    | {"speculators_model_type": "dflash2"},
    "transformer_layer_config.model_type is 'deepseek_v3', neither llama nor qwen3": _layers(
        model_type="deepseek_v3"
    ),
    "transformer_layer_config.num_key_value_heads is 3, of 4 heads": _layers(num_key_value_heads=3),
    "the layers of config.json cannot be read: Validation error for field 'hidden_size'": _layers(
        hidden_size="32"
    ),
    "head_dim is -8, not a positive whole number": _layers(head_dim=-8),
    "hidden_act is 'swish9'": _layers(hidden_act="swish9"),
    "transformer_layer_config.rope_parameters cannot be read": _layers(  # they differ by layer
        rope_theta=None,
        layer_types=[FULL] * LAYERS,
        rope_parameters={FULL: {"rope_type": "default", "rope_theta": 5.0}},
    ),
    "transformer_layer_config.rope_parameters give no frequencies for these heads": _layers(
        rope_theta=0.0
    ),
    "the layers of config.json cannot be read": _layers(head_dim=7),
    "rms_norm_eps is -1.0": _layers(rms_norm_eps=-1.0),
    "rope_parameters turn parts of heads": _layers(partial_rotary_factor=0.5),
    "sliding_window is None, and there are sliding layers": _layers(layer_types=[SLIDING] * LAYERS),
    "layer_types has chunked_attention": _layers(layer_types=["chunked_attention"] * LAYERS),
    "it was trained for other weights of the target": PLAIN | {"target_fingerprint": "0" * 32},
}
TENSORS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "unknown tensors: extra.weight": (PLAIN, _with(extra__weight=draw(0, 3))),
    "unknown tensors: markov_head.markov_w1.weight": (
        SPECULATORS,
        _with(markov_head__markov_w1__weight=draw(0, VOCAB, 4)),
    ),
    "tensors are missing: norm.weight": (PLAIN, _without("norm.weight")),
    "tensors are missing: layers.1.self_attn.q_norm.weight": (
        PLAIN,
        _without("layers.1.self_attn.q_norm.weight"),
    ),
    "layers.1.mlp.down_proj.weight [32, 47] instead of [32, 48]": (
        PLAIN,
        _with(layers__1__mlp__down_proj__weight=draw(0, HIDDEN, 47)),
    ),
    "not finite: norm": (PLAIN, _with(norm__weight=torch.full((HIDDEN,), math.nan))),
    "tensors are missing: d2t": (SMALL, _with(**FEWER)),
    "tensors are missing: lm_head.weight": (SMALL, _with(d2t=REDUCED["d2t"])),
    "t2d [95] instead of [96]": (SMALL, _with(**FEWER, d2t=REDUCED["d2t"], t2d=REDUCED["t2d"][1:])),
    "d2t gives ids outside of the target's 96": (SMALL, _with(**FEWER, d2t=FAR)),
    "d2t gives an id twice": (SMALL, _with(**FEWER, d2t=TWICE)),
    "d2t holds torch.float32": (SMALL, _with(**FEWER, d2t=REDUCED["d2t"].float())),
    "markov_head_type is 'gated', and only 'vanilla' is read": (
        SPARK | {"markov_head_type": "gated"},
        _with(**spark_tensors()),
    ),
    "confidence_head.proj.weight reads 7 features, neither 32 nor 32": (
        SPARK,
        _with(confidence_head__proj__weight=draw(0, 1, 7)),
    ),
    "markov_head.markov_w1.weight [50, 4] instead of [96, 4]": (
        SPARK,
        _with(
            markov_head__markov_w1__weight=draw(0, 50, 4),
            markov_head__markov_w2__weight=draw(0, VOCAB, 4),
        ),
    ),
}
REFUSALS = {fault: (config, dict[str, torch.Tensor]) for fault, config in CONFIGS.items()} | TENSORS


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    config, change = REFUSALS[fault]
    folder = write_folder(tmp_path, config, change(block_tensors()))
    with pytest.raises(DraftRefusedError) as refused:
        read(folder, FACTS)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}: ")
    assert fault in message
    assert "\n" not in message


def test_another_width_needs_ends_of_its_own(tmp_path: Path) -> None:
    tensors = block_tensors() | {"fc.weight": draw(0, HIDDEN, 60)}
    folder = write_folder(tmp_path, SPECULATORS, tensors)
    with pytest.raises(
        DraftRefusedError, match=r"embed_tokens\.weight \(the target's is for 20 dim"
    ):
        read(folder, TargetFacts(20, VOCAB, 12, ""))


def test_another_embedding_of_the_mask_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, PLAIN, block_tensors())
    torch.save({"embedding": draw(0, HIDDEN)}, tmp_path / "mask_embedding.pt")
    with pytest.raises(DraftRefusedError, match="mask_embedding"):
        read(folder, FACTS)
