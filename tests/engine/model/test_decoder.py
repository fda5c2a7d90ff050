"""Hidden states on their way through a decoder are transformers' own, whatever form its weights have."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from bench.census import tiny_model as census_model
from engine.batch import NORMED, build_batch
from engine.kernels.integers import can_multiply
from engine.model.decoder import decoder_layers, kept_states
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.loader import load_model
from engine.model.quantization import complete_packed, quantize_model
from engine.model.runner import ModelRunner
from engine.request.errors import UnsupportedModelError
from engine.weights.rounding.int8 import is_exact
from worlds.packed_models import FORMATS
from worlds.tiny_models import (
    ARCHITECTURES,
    BLOCK_SIZE,
    CPU,
    chunk,
    make_runner,
    own_states,
    random_ids,
    reference_model,
    scattered_table,
    tiny_model,
)

TEXT = random_ids(3, 20)


def every_layer(model: PreTrainedModel) -> tuple[int, ...]:
    return (NORMED, *range(model.config.num_hidden_layers + 1))


def final_norm(model: PreTrainedModel) -> nn.Module:
    base: Any = model.base_model
    names = ("norm", "ln_f", "embedding_norm", "norm_f", "final_layernorm")
    return next(getattr(base, name) for name in names if hasattr(base, name))


def run(runner: ModelRunner, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """States of the text, in chunks."""
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    base, table = 0, scattered_table(0, 12)
    for count in (9, 1, 1, 9):
        batch = build_batch([chunk(TEXT, base, count, table)], BLOCK_SIZE, tuple(layers))
        for layer, states in zip(layers, runner.forward(batch).hidden, strict=True):
            found[layer].append(states.clone())
        base += count
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def check(model: PreTrainedModel, runner: ModelRunner, rtol: float, atol: float) -> None:
    expected, found = own_states(model, TEXT), run(runner, every_layer(model))
    with torch.inference_mode():
        last = model.config.num_hidden_layers
        expected[last], found[last] = expected[NORMED], final_norm(model)(found[last])
    assert found.keys() == expected.keys()
    for layer, states in found.items():
        torch.testing.assert_close(states, expected[layer], rtol=rtol, atol=atol)
    # Each is another, or it would not matter which is taken.
    for layer in range(1, last):
        assert not torch.allclose(found[layer], found[layer - 1], rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_are_those_of_transformers(name: str) -> None:
    model = reference_model(name)
    check(model, make_runner(model, exact=False), 1e-3, 2e-4)


@pytest.mark.parametrize("name", ["opt", "llama4_text"])
@torch.inference_mode()
def test_what_the_head_reads_is_found_in_models_that_call_a_part_of_their_base(name: str) -> None:
    model = census_model(name).eval()
    with kept_states(model, (NORMED,)) as kept:
        logits = model(input_ids=torch.tensor([TEXT])).logits[0]
    assert torch.equal(model.get_output_embeddings()(kept[NORMED]), logits)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt2"])
def test_states_of_packed_and_fused_layers_are_too(name: str) -> None:
    runner = make_runner(reference_model(name), exact=True)
    pack_linears(runner.model, 256, exact=True)
    fuse(runner.model)
    check(reference_model(name), runner, 1e-3, 5e-4)


@pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_states_in_8_bits_are_those_of_the_same_weights_without_the_engine(name: str) -> None:
    model = tiny_model(name)
    quantize_model(model)
    runner = make_runner(model, exact=True)
    fuse(runner.model)
    check(model, runner, 2e-2, 2e-2)


@pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")
@pytest.mark.parametrize("name", ["Q4_K_and_Q6_K", "Q8_0", "awq", "w8a8"])
def test_states_of_checkpoints_in_few_bits_are_those_without_the_engine(
    name: str, tmp_path: Path
) -> None:
    model = load_model(str(FORMATS[name](tmp_path)), CPU, "float32")
    complete_packed(model)
    runner = make_runner(model, exact=True)
    fuse(runner.model)
    check(model, runner, 1e-3, 1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_asking_changes_no_logits_and_leaves_nothing_behind(name: str) -> None:
    runner = make_runner(reference_model(name), exact=True)
    rows = [chunk(TEXT, 0, len(TEXT), scattered_table(0, 12))]
    before = num_hooks(runner.model)
    asked, plain = (
        runner.forward(build_batch(rows, BLOCK_SIZE, layers))
        for layers in (every_layer(runner.model), ())
    )
    assert torch.equal(asked.logits, plain.logits)
    assert plain.hidden == ()
    assert num_hooks(runner.model) == before


def num_hooks(model: PreTrainedModel) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


@torch.inference_mode()
def test_layers_may_be_called_by_keyword_and_return_more_than_states() -> None:
    model = copy.deepcopy(reference_model("llama"))
    expected = own_states(model, TEXT)
    layers = decoder_layers(model)
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, given, named: ((), {**named, "hidden_states": given[0]}), with_kwargs=True
        )
    layers[-1].register_forward_hook(lambda _, __, output: (output, "more"))
    with kept_states(model, (0, 1, 2)) as kept:
        layers[-1].register_forward_hook(lambda _, __, output: output[0])
        model(input_ids=torch.tensor([TEXT]), use_cache=False)
    kept[NORMED] = final_norm(model)(kept.pop(2))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[layer], expected[layer]) for layer in kept)


def test_layers_that_are_not_there_are_refused_at_start() -> None:
    runner = make_runner(reference_model("llama"), exact=False)
    for layer in (3, -2):
        with pytest.raises(UnsupportedModelError, match=f"no hidden states of layer {layer}"):
            runner.prepare((NORMED, layer))
    model: Any = copy.deepcopy(reference_model("llama"))
    model.model.layers.append(nn.Identity())
    with pytest.raises(UnsupportedModelError, match="no single list of decoder layers"):
        decoder_layers(model)


def test_layers_that_hand_on_something_else_are_refused_at_start() -> None:
    """As four streams of states in place of one."""
    runner = make_runner(reference_model("llama"), exact=False)
    layer: Any = runner.model.model.layers[1]
    layer.register_forward_pre_hook(lambda _, given: given[0].expand(4, -1, -1)[None])
    forward = layer.forward
    layer.forward = lambda states, **named: forward(states[0, :1], **named)
    runner.prepare((0,))
    with pytest.raises(
        UnsupportedModelError, match="layer 1 of LlamaForCausalLM are not one vector"
    ):
        runner.prepare((0, 1))
