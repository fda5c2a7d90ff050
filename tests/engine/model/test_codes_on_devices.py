"""Models in few bits on a device, for which a CPU passes: whatever says on which device it is made has to
say the model's, and products are Triton's programs under its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.kernels.triton import code_ops
from engine.kernels.triton.packed_codes import PackedCodes
from engine.model import loader as loader_module
from engine.model.calibration.sequence import quantize_4_bits
from engine.model.experts import is_experts, packed_experts
from engine.model.layers import GroupedLinear
from engine.model.loader import load_model
from engine.model.product import GroupedEmbedding
from engine.model.quantization import (
    complete_packed,
    num_bytes,
    pack_stored,
    packed_weights,
    quantization_info,
    quantize_model,
    replace_linears,
    round_inputs,
    rounds_inputs,
)
from worlds.device_world import no_host
from worlds.interpreted import ON_CPU, patching_once
from worlds.packed_models import FORMATS
from worlds.tiny_models import CPU, tiny_model

pytestmark = ON_CPU
BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "awq": 4 + 24 / 32, "gptq_in_order": 4 + 24 / 32,
    "gptq_8_bits": 8 + 24 / 32, "w4a16": 4.5, "fp8": 9,
}  # fmt: skip
"""Bits of a weight whose inputs fill units, with all that belongs to it, where a layer has one scheme."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with no_host(), patching_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_ops, "_CHUNKS", (128,))
        yield


def load(path: Path, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> PreTrainedModel:
    """Loads a model; a tensor that names no device is made on "meta" meanwhile, and has no values."""

    def elsewhere(model: PreTrainedModel, packed: bool) -> None:
        with torch.device("meta"):
            pack_stored(model, packed)

    monkeypatch.setattr(loader_module, "pack_stored", elsewhere)
    return load_model(str(path), CPU, **asked)


def layers_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if isinstance(each, GroupedLinear)}


def weight_of(layer: Any) -> torch.Tensor:
    """A layer's weight in float32, in its features' order."""
    channels = torch.arange(layer.first, layer.first + layer.out_features)
    found = layer.product.packed.weight_of(channels).dequantized()
    return found if layer.product.order is None else found[:, layer.product.order.argsort()]


@torch.inference_mode()
def logits(model: PreTrainedModel, count: int = 5) -> torch.Tensor:
    ids = torch.arange(count)[None] * 7 % model.config.vocab_size
    return model(input_ids=ids, use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_stays_in_its_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FORMATS[name](tmp_path)
    plain = load(path, monkeypatch, packed=False, dtype="float32")
    model = load(path, monkeypatch, dtype="float32")
    layers = layers_of(model)
    stored = [each for each in plain.modules() if type(each) is torch.nn.Linear]
    assert name == "mxfp4" or len(layers) > len(stored) // 2
    assert not any(map(is_experts, model.modules()))
    for layer_name, layer in layers.items():
        packed = layer.product.packed
        assert isinstance(packed, PackedCodes)
        assert torch.equal(weight_of(layer), plain.get_submodule(layer_name).weight), layer_name
        if name in BITS and layer.in_features % packed.format.unit == 0:
            own = sum(each.nbytes for key, each in packed.tensors.items() if key != "bias")
            assert own == layer.in_features * layer.out_features * BITS[name] / 8
    for each in model.modules():
        if isinstance(each, GroupedEmbedding):
            embedding: Any = plain.get_input_embeddings()
            ids = torch.tensor([[3, 1]])
            assert torch.equal(each(ids), embedding(ids))
    assert num_bytes(model) < 0.75 * num_bytes(plain)
    expected = logits(plain)
    found = logits(model)
    assert (found - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", ["Q4_K_and_Q6_K_tied", "gptq_in_order", "w8a8", "fp8"])
def test_layers_that_read_one_tensor_are_computed_together(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits that they have apart; a head in floats is rounded, too. What is said is what is
    held."""
    model = load(FORMATS[name](tmp_path), monkeypatch)
    before = logits(model)
    with torch.device("meta"):
        complete_packed(model, with_head=False)
    layers = layers_of(model)
    products = {each.product for each in layers.values()}
    assert len(products) < len(layers)
    assert torch.equal(logits(model), before)
    complete_packed(model)
    assert isinstance(model.get_output_embeddings(), GroupedLinear)
    round_inputs(model, True)
    assert not rounds_inputs(model)
    info = quantization_info(model)
    assert info is not None
    assert (info.source, info.head) == ("checkpoint", True)
    assert info.activation_bits == 8 * model.dtype.itemsize
    held = {
        id(each): each for _, packed in packed_weights(model) for each in packed.tensors.values()
    }
    held |= {id(each): each for each in (*model.parameters(), *model.buffers())}
    assert info.num_bytes == sum(each.nbytes for each in held.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_floats_are_rounded_to_8_bits(name: str) -> None:
    model, plain = tiny_model(name), tiny_model(name)
    with torch.device("meta"):
        quantize_model(model)
    layers = layers_of(model)
    for layer_name, layer in layers.items():
        found, exact = weight_of(layer), plain.get_submodule(layer_name).weight
        exact = exact if name != "gpt2" or layer_name == "lm_head" else exact.T
        assert (found - exact).abs().max() <= exact.abs().max() / 127
    info = quantization_info(model)
    assert info is not None
    assert (info.method, info.source, info.bits, info.head) == ("int8", "start", 8, True)
    expected = logits(plain)
    assert (logits(model) - expected).abs().max() < 0.2 * expected.std()
    assert len([*packed_experts(model)]) == (2 if name == "qwen3_moe" else 0)
    assert not any(map(is_experts, model.modules()))


def test_floats_are_rounded_to_4_bits_by_what_layers_read() -> None:
    """As well as elsewhere. Sums of other orders, by CPU, turn some codes into their neighbours, and the
    codes after them make up for that."""
    texts = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    wanted: dict[str, torch.Tensor] = {}
    for group in quantize_4_bits(tiny_model("llama"), texts):
        wanted |= {name: weight.dequantized() for name, weight in group.items()}
    model = tiny_model("llama")
    with torch.device("meta"):
        replace_linears(model, quantize_4_bits(model, texts), "int4")
    layers, floats = layers_of(model), tiny_model("llama").state_dict()
    assert layers.keys() == wanted.keys()
    for name, layer in layers.items():
        assert layer.product.packed.format.bits == 4
        found, weight = weight_of(layer), floats[f"{name}.weight"]
        error = (wanted[name] - weight).norm().item()
        assert (found - weight).norm().item() == pytest.approx(error, rel=0.05), name
