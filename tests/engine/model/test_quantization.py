"""Whole models in 8 bits: what is replaced, what is said of it, and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.census import tiny_model as census_model
from engine.attention.backend import AttentionNeeds, build_attention
from engine.build import build_engine_for
from engine.build import target as build_module
from engine.config import EngineConfig
from engine.kernels.integers import can_multiply
from engine.model import quantization
from engine.model.calibration.sequence import quantize_4_bits
from engine.model.experts import is_experts, packed_experts, unrounded_layers
from engine.model.layers import GroupedLinear
from engine.model.linear import pack_linears
from engine.model.loader import attach_attention, load_model, load_tokenizer, state_shapes
from engine.model.product import GroupedProduct
from engine.model.quantization import (
    has_packed_weights,
    quantization_info,
    quantize_model,
    round_inputs,
)
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact, check_logits, reference_logits
from engine.request.errors import UnsupportedModelError
from engine.request.info import QuantizationInfo
from engine.states.build import checked_states
from engine.weights.rounding.int8 import GROUP, quantize_by_channel
from slipstream.tools.quantize.written import store_int8
from worlds.tiny_models import ARCHITECTURES, BLOCK_SIZE, CPU, HYBRIDS, MIXTURES, tiny_model

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")


def grouped_layers(model: nn.Module) -> dict[str, GroupedLinear]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, GroupedLinear)
    }


def quantized(model: Any, with_head: bool = True) -> QuantizationInfo:
    quantize_model(model, with_head)
    info = quantization_info(model)
    assert info is not None
    return info


def products(model: nn.Module) -> set[GroupedProduct]:
    return {layer.product for layer in grouped_layers(model).values()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_runs_in_8_bits(name: str) -> None:
    model = tiny_model(name)
    if name in HYBRIDS + MIXTURES:  # states add up what rounding does to rows before, routers flip
        for weight in model.parameters():
            weight.mul_(0.4 if weight.dim() >= 2 else 1)
    before = reference_logits(model)
    gates, num_weights = unrounded_layers(model), model.num_parameters()
    info = quantized(model)
    experts = [product for _, each in packed_experts(model) for product in each.products]
    assert info.num_layers == len(grouped_layers(model)) + len(experts) > 0
    assert bool(experts) == (name in MIXTURES)
    assert not any(is_experts(each) for each in model.modules())
    assert info.num_parameters == num_weights or name not in MIXTURES  # a tied head is a copy
    assert 0 < info.share <= 1
    assert {module for module in model.modules() if type(module) is nn.Linear} == gates
    after = reference_logits(model)
    errors = (after - before).norm(dim=-1) / before.norm(dim=-1)
    # a row whose router takes another expert is another row: the median says what rounding does
    assert 0 < float(errors.median()) < 0.1
    shapes = attach_attention(model)
    pack_linears(model, 64, exact=True)  # routers
    needs = AttentionNeeds.of(model, shapes, "exact", BLOCK_SIZE)
    states = checked_states(state_shapes(model), model.device)
    runner = ModelRunner(model, build_attention(needs, 24), states=states)
    check_logits(runner, after)
    assert check_exact(runner)


@pytest.mark.parametrize(
    ("kind", "router"),
    [
        ("afmoe", "router.gate"),
        ("hunyuan_v1_moe", "gate.wg"),
        ("qwen2_moe", "shared_expert_gate"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_routers_keep_their_type(kind: str, router: str, bits: int) -> None:
    model = census_model(kind)
    routers = {name for name, _ in model.named_modules() if name.endswith(router)}
    if bits == 8:
        quantize_model(model)
        rounded = set(grouped_layers(model))
    else:
        rounded = {name for group in quantize_4_bits(model, random_rows()) for name in group}
    assert rounded
    assert routers
    assert not rounded & routers


@pytest.mark.parametrize("kind", ["mamba2", "longcat_flash"])
def test_models_that_read_a_layers_weight_are_served_in_8_bits(kind: str) -> None:
    model = census_model(kind)
    quantized(model)
    assert float(reference_logits(model).isfinite().float().mean()) == 1.0


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"])
def test_what_stays_in_its_type_does_so_in_written_8_bits(kind: str) -> None:
    """Gates of states and routers."""
    model = tiny_model(kind)
    stays = unrounded_layers(model)
    names = {name for name, each in model.named_modules() if each in stays}
    assert names
    assert not names & set(store_int8(model))
    assert names <= {*model.config.quantization_config["ignore"]}


def random_rows() -> torch.Tensor:
    return torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(0))


def test_layers_that_read_one_tensor_are_computed_together() -> None:
    model = tiny_model("llama")
    info = quantized(model)
    # Of each of two layers: queries, keys and values; output; gate and up; down. And the head.
    assert len(products(model)) == 2 * 4 + 1
    assert info.num_layers == 2 * 7 + 1
    layers = grouped_layers(model)
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
    info = quantized(model)
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
    info = quantized(model, with_head=False)
    assert not info.head
    assert type(model.get_output_embeddings()) is nn.Linear


def test_a_tied_head_leaves_the_embeddings_as_they_are() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    embeddings = model.get_input_embeddings().weight.clone()
    info = quantized(model)
    assert info.head
    assert torch.equal(model.get_input_embeddings().weight, embeddings)


def test_machines_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "computes_whole_numbers", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match="quantization=int8: .* no AVX2"):
        quantize_model(tiny_model("llama"))
    if not torch.cuda.is_available():
        assert quantization.refusal(torch.device("cuda")) == "there is no CUDA device here"


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
    ours = tiny_model("qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "quantize_weight", quantize_by_channel)
        quantize_model(ours, with_head=False)
    expected = reference_logits(ours)
    names = store_int8(model)
    assert "lm_head" not in names
    model.save_pretrained(tmp_path)
    stored = load_model(str(tmp_path), CPU)
    assert has_packed_weights(stored)
    round_inputs(stored)
    info = quantization_info(stored)
    assert info is not None
    assert (info.num_layers, info.head, info.source) == (len(names), False, "checkpoint")
    torch.testing.assert_close(reference_logits(stored), expected, rtol=1e-4, atol=1e-4)

    served = build(load_model(str(tmp_path), CPU)).info.quantization
    assert served is not None
    assert served.head  # which is rounded when it is loaded
    assert set(served.schemes) == {"8 bits, a scale per channel", "8 bits, groups of 32"}
    for kind in ("none", "int8"):
        with pytest.raises(UnsupportedModelError, match=f"quantization={kind}: .* already"):
            build(load_model(str(tmp_path), CPU), quantization=kind)
    plain = load_model(str(tmp_path), CPU, packed=False)
    assert not has_packed_weights(plain)
    assert build(plain, quantization="none").info.quantization is None


def test_inputs_may_keep_their_floats() -> None:
    model = tiny_model("llama")
    before = reference_logits(model)
    engine = build(model, quantization="int8", quantize_activations=False)
    assert engine.info.quantization is not None
    assert engine.info.quantization.activation_bits == 32
    assert engine.info.exact_verified
    kept, rounded = tiny_model("llama"), tiny_model("llama")
    for each in (kept, rounded):
        quantize_model(each)
    round_inputs(kept, False)
    near, far = ((reference_logits(each) - before).norm() for each in (kept, rounded))
    assert near < far


def test_floats_are_rounded_to_4_bits_by_texts_of_the_models_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_module, "CALIBRATION_TOKENS", 128)
    tokenizer = load_tokenizer("bundled")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    engine = build_engine_for(
        model, tokenizer, EngineConfig(num_blocks=16, drafters=("ngram",), quantization="int4")
    )
    info = engine.info.quantization
    assert info is not None
    assert (info.method, info.source, info.head) == ("int4", "start", True)
    head = len(tokenizer) * model.config.hidden_size
    rest = info.num_quantized - head
    assert info.schemes == {"4 bits, groups of 32": rest, "8 bits, groups of 32": head}
    assert engine.info.exact_verified
    # Queries, keys and values of each layer; output; gate and up; down. And the head.
    assert len(products(model)) == 2 * 4 + 1


def test_what_writes_no_texts_is_not_rounded_to_4_bits() -> None:
    with pytest.raises(UnsupportedModelError, match="without a tokenizer"):
        build(tiny_model("llama"), quantization="int4")
