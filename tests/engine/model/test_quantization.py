"""Whole models in 8 bits: what is replaced, what is said of it, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.model.stored_int8 import StoredInt8Config, StoredInt8Linear
from torch import nn

from engine.attention.backend import AttentionNeeds, build_attention
from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.model import quantization
from engine.model.int8 import GROUP, Int8Product, is_exact, quantize_by_channel
from engine.model.layers import Int8Linear
from engine.model.linear import pack_linears
from engine.model.loader import attach_attention, load_model
from engine.model.quantization import has_stored_weights, quantize_model, store_int8
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact, check_logits, reference_logits
from engine.request.errors import UnsupportedModelError
from worlds.tiny_models import ARCHITECTURES, BLOCK_SIZE, CPU, tiny_model

pytestmark = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")


def int8_layers(model: nn.Module) -> dict[str, Int8Linear]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)
    }


def products(model: nn.Module) -> set[Int8Product]:
    return {layer.product for layer in int8_layers(model).values()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_runs_in_8_bits(name: str) -> None:
    model = tiny_model(name)
    before = reference_logits(model)
    info = quantize_model(model)
    assert info.num_layers == len(int8_layers(model)) > 0
    assert 0 < info.share <= 1
    assert not any(type(module) is nn.Linear for module in model.modules())
    after = reference_logits(model)
    error = float((after - before).norm() / before.norm())
    assert 0 < error < 0.25  # large random weights are no kind case
    shapes = attach_attention(model)
    pack_linears(model, 64, exact=True)  # routers, and experts kept in one tensor
    needs = AttentionNeeds.of(model, shapes, "exact", BLOCK_SIZE)
    runner = ModelRunner(model, build_attention(needs, 24))
    check_logits(runner, after)
    assert check_exact(runner)


def test_layers_that_read_one_tensor_are_computed_together() -> None:
    model = tiny_model("llama")
    info = quantize_model(model)
    # Of each of two layers: queries, keys and values; output; gate and up; down. And the head.
    assert len(products(model)) == 2 * 4 + 1
    assert info.num_layers == 2 * 7 + 1
    layers = int8_layers(model)
    attention = "model.layers.0.self_attn"
    together = {layers[f"{attention}.{each}_proj"].product for each in "qkv"}
    assert len(together) == 1
    assert layers[f"{attention}.o_proj"].product not in together


def test_what_is_said_of_it_is_what_is_held() -> None:
    model = tiny_model("llama")
    num_parameters = sum(each.numel() for each in model.parameters())
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    num_quantized = sum(each.weight.numel() for each in linears)
    rest = num_parameters - num_quantized
    info = quantize_model(model)
    assert (info.method, info.bits, info.head) == ("int8", 8, True)
    assert (info.num_quantized, info.num_parameters) == (num_quantized, num_parameters)
    buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    held = 0
    for product in products(model):
        channels, groups = (-(-size // 32) for size in (product.out_features, product.in_features))
        # A byte of each weight, two of each group's scale, four of each channel's.
        held += 32 * channels * (groups * (GROUP + 2) + 4)
    assert info.num_bytes == held + 4 * rest + buffers


def test_the_head_can_keep_its_type() -> None:
    model = tiny_model("llama")
    info = quantize_model(model, with_head=False)
    assert not info.head
    assert type(model.get_output_embeddings()) is nn.Linear


def test_a_tied_head_leaves_the_embeddings_as_they_are() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    embeddings = model.get_input_embeddings().weight.clone()
    info = quantize_model(model)
    assert info.head
    assert torch.equal(model.get_input_embeddings().weight, embeddings)


def test_machines_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "is_exact", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match="quantization=int8: .* no VNNI"):
        quantize_model(tiny_model("llama"))
    assert "for CPUs, not for cuda" in str(quantization.refusal(torch.device("cuda")))


def build(model: Any, **config: Any) -> Any:
    return build_engine_for(model, None, EngineConfig(num_blocks=16, drafters=("ngram",), **config))


def test_an_engine_says_what_it_serves() -> None:
    engine = build(tiny_model("llama"), quantization="int8")
    info = engine.info
    assert info.quantization is not None
    assert info.quantization.bits == 8
    assert info.determinism == "exact"
    assert info.exact_failed == ()
    plain = build(tiny_model("llama"), quantization="none").info
    assert plain.quantization is None
    assert plain.num_parameters == info.num_parameters


def test_a_checkpoint_in_8_bits_is_served_by_its_own_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2")  # its queries, keys and values have biases
    quantized = tiny_model("qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "quantize_weight", quantize_by_channel)
        quantize_model(quantized, with_head=False)
    expected = reference_logits(quantized)
    names = store_int8(model)
    assert "lm_head" not in names
    model.save_pretrained(tmp_path)
    stored = load_model(str(tmp_path), CPU)
    assert has_stored_weights(stored)
    info = quantize_model(stored, with_head=False)
    assert (info.num_layers, info.head) == (len(names), False)
    torch.testing.assert_close(reference_logits(stored), expected, rtol=1e-4, atol=1e-4)

    engine = build(load_model(str(tmp_path), CPU))
    assert engine.info.quantization is not None
    assert engine.info.quantization.head  # which is quantised when it is loaded
    with pytest.raises(UnsupportedModelError, match="quantization=none"):
        build(load_model(str(tmp_path), CPU), quantization="none")
