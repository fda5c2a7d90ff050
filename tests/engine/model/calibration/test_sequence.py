"""Layers are rounded in order, each for what those before it hand on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.model.calibration.sequence import quantize_4_bits
from engine.model.experts import unrounded_layers
from engine.model.layers import as_linear, is_plain
from engine.model.loader import load_model, load_tokenizer
from engine.request.errors import UnsupportedModelError
from engine.weights.rounding.gptq import round_by_inputs
from worlds.grouped_weights import round_to_nearest
from worlds.tiny_models import ARCHITECTURES, CPU, own_logits, random_ids, tiny_model


def windows(count: int, length: int = 24) -> torch.Tensor:
    return torch.tensor(random_ids(3, count * length)).view(count, length)


def exactly(weight: torch.Tensor, hessian: torch.Tensor) -> GroupedWeight:
    """Rounds nothing away: a scale per channel, and the weights as minima are no codes at all."""
    del hessian
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    return GroupedWeight(codes, 4, 0, 1, torch.ones_like(weight), minima=weight.float())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_linear_layer_of_the_decoder_comes_once_and_in_order(name: str) -> None:
    model = tiny_model(name)
    gates = unrounded_layers(model)
    plain = {key: each for key, each in model.named_modules() if is_plain(each)}
    wanted = {key: as_linear(each).weight for key, each in plain.items() if each not in gates}
    wanted.pop("lm_head")
    text = random_ids(1, 20)
    before = own_logits(model, text)
    found = {
        key: weight
        for group in quantize_4_bits(model, windows(3), exactly)
        for key, weight in group.items()
    }
    assert found.keys() == wanted.keys()
    layers = [int("".join(c for c in key.split(".")[2] if c.isdigit())) for key in found]
    assert layers == sorted(layers)
    for key, weight in found.items():
        assert torch.equal(weight.dequantized(), wanted[key])
    assert torch.equal(own_logits(model, text), before)


def test_those_that_read_one_input_come_together() -> None:
    groups = [list(group) for group in quantize_4_bits(tiny_model("llama"), windows(2), exactly)]
    names = [[name.rpartition(".")[2] for name in group] for group in groups]
    assert (
        names
        == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]] * 2
    )


def test_inputs_come_from_the_rounded_part() -> None:
    """Each Hessian is that of a forward of the whole model as it stands when its layers are due."""
    model = tiny_model("llama")
    texts = windows(3)
    seen: list[torch.Tensor] = []

    def noting(weight: torch.Tensor, hessian: torch.Tensor) -> GroupedWeight:
        seen.append(hessian.clone())
        return round_to_nearest(weight)

    def inputs_of(name: str) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        handle = model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs: rows.append(inputs[0].flatten(0, 1))
        )
        for text in texts:
            own_logits(model, text.tolist())
        handle.remove()
        return torch.cat(rows)

    for group in quantize_4_bits(model, texts, noting):
        rows = inputs_of(next(iter(group)))  # of the layers before it, which stand already
        for hessian in seen:
            torch.testing.assert_close(hessian, rows.T @ rows, rtol=1e-3, atol=1e-2)
        seen.clear()


def test_what_takes_a_layers_place_is_what_those_behind_it_read() -> None:
    class Nothing(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(inputs)

    model = tiny_model("llama")
    hessians: dict[str, torch.Tensor] = {}
    found: list[torch.Tensor] = []

    def noting(weight: torch.Tensor, hessian: torch.Tensor) -> GroupedWeight:
        found.append(hessian)
        return round_to_nearest(weight)

    for group in quantize_4_bits(model, windows(2), noting):
        for name in group:
            hessians[name] = found[-1]
            if name.endswith("o_proj"):
                model.set_submodule(name, Nothing())
        if "model.layers.0.mlp.gate_proj" in group:
            layer: Any = model.model.layers[0]
            rows = layer.post_attention_layernorm(model.model.embed_tokens(windows(2))).flatten(
                0, 1
            )
            torch.testing.assert_close(found[-1], rows.T @ rows, rtol=1e-3, atol=1e-2)


def test_calibrated_models_lie_twice_as_near_as_those_rounded_to_the_nearest() -> None:
    root = Path(__file__).parents[4]
    tokenizer = load_tokenizer("bundled")
    source, other = (
        tokenizer.encode((root / name).read_text(encoding="utf-8"), add_special_tokens=False)
        for name in ("engine/model/loader.py", "engine/weights/gguf/file.py")
    )
    texts, held_out = torch.tensor(source[:2000]).view(-1, 250), other[:250]
    whole = own_logits(load_model("bundled", CPU), held_out).float().log_softmax(-1)
    changes = []
    for rounding in (round_by_inputs, lambda weight, _: round_to_nearest(weight)):
        model = load_model("bundled", CPU)
        for _ in quantize_4_bits(model, texts, rounding):
            pass
        found = own_logits(model, held_out).float().log_softmax(-1)
        changes.append(float(F.kl_div(found, whole, reduction="batchmean", log_target=True)))
    assert changes[0] < 0.5 * changes[1], changes


def test_models_whose_layers_hand_on_more_are_refused() -> None:
    model = tiny_model("llama")
    layer: Any = model.model.layers[1]
    model.model.layers[0].register_forward_pre_hook(
        lambda _, inputs: setattr(layer, "seen", inputs[0])
    )
    kept = layer.forward
    layer.forward = lambda states, **named: kept(states, **named)
    model.model.layers[1].register_forward_pre_hook(
        lambda module, inputs, named: (inputs, {**named, "residual": module.seen}), with_kwargs=True
    )
    with pytest.raises(UnsupportedModelError, match="hand on more than hidden states"):
        next(quantize_4_bits(model, windows(2)))
    del model.model.layers
    with pytest.raises(UnsupportedModelError, match="no single list of decoder layers"):
        next(quantize_4_bits(model, windows(2)))
