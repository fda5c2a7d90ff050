"""Experts over packed weights: what they compute, in whatever company, in every form that weights have;
and how checkpoints bring them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.kernels.integers import can_multiply
from engine.model.experts import (
    PackedExperts,
    grouped_experts,
    is_experts,
    pack_float_experts,
    packed_experts,
    restored_experts,
    rounded_experts,
)
from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.experts import GgufExperts
from engine.weights.gguf.blocks import BLOCK_TYPES
from engine.weights.rounding.gptq import round_to_nearest
from engine.weights.rounding.int8 import quantize_weight
from worlds.changed_folders import stored_tensors
from worlds.packed_checkpoints import (
    AWQ,
    GPTQ,
    INT4,
    INT8,
    TOKENS,
    Make,
    awq,
    configuration,
    gptq,
    make_all,
    packed,
    signed,
    with_inputs,
    write_folder,
    write_mxfp4,
)
from worlds.tiny_models import CPU, tiny_model

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")
WIDE: dict[str, Any] = {
    "mixtral": {"hidden_size": 256, "intermediate_size": 256},
    "gpt_oss": {"hidden_size": 256, "intermediate_size": 256},
}
"""Blocks of GGUF files have up to 256 values."""
Q4_K, Q6_K, IQ4_XS, MXFP4 = "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"


def experts_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model's module of experts, with weights of some twentieths."""
    model = tiny_model(name, dtype, **WIDE[name])
    own: Any = next(each for each in model.modules() if is_experts(each))
    for weight in own.parameters():
        weight.mul_(0.2)
    return own


def inputs_for(own: Any, num_rows: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights, chosen = torch.rand(num_rows, own.num_experts, generator=generator).topk(2)
    rows = torch.randn(num_rows, 256, generator=generator)
    return rows.to(own.down_proj.dtype), chosen, weights


def blocks(own: Any, kinds: dict[str, str]) -> GgufExperts:
    """Experts of random blocks in the place of ``own``."""
    found = GgufExperts(own, kinds, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in found.named_parameters():
        if name.endswith("bias"):
            tensor.normal_(generator=generator)
            continue
        tensor.random_(0, 256, generator=generator)
        kind = BLOCK_TYPES[kinds[name]]
        each = tensor.data.view(*tensor.shape[:2], -1, kind.num_bytes)
        for start in kind.halves:
            half = torch.tensor([0.0004], dtype=torch.float16).view(torch.uint8)
            each[..., start : start + 2] = half
        if not kind.halves:
            each[..., 0] = 120 + each[..., 0] % 4
    return found


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def assert_alone_as_in_company(experts: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    every = experts(*given)
    for row in range(0, len(every), 7):
        assert torch.equal(experts(*(each[row : row + 1] for each in given))[0], every[row])
    assert torch.equal(experts(*(each.flip(0) for each in given)).flip(0), every)


@torch.no_grad()
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
def test_floats_compute_what_transformers_loop_does(
    name: str, dtype: torch.dtype, bound: float
) -> None:
    own = experts_of(name, dtype)
    given = inputs_for(own)
    expected = own(*given)
    found = pack_float_experts(own)
    assert found is not None
    assert not list(own.parameters())
    assert error(found(*given), expected) < bound
    assert_alone_as_in_company(found, given)


@torch.no_grad()
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(("rounding", "bound"), [(quantize_weight, 0.02), (round_to_nearest, 0.2)])
def test_rounded_ones_are_near_the_floats(name: str, rounding: Any, bound: float) -> None:
    own = experts_of(name)
    given = inputs_for(own)
    expected = own(*given)
    found = rounded_experts(own, rounding, "int8", "in words", torch.float32)
    assert 1e-4 < error(found(*given), expected) < bound
    assert not list(own.parameters())
    assert_alone_as_in_company(found, given)


KINDS = {
    "together": ("mixtral", {"gate_up_proj": Q4_K, "down_proj": Q6_K}),
    "apart": ("mixtral", {"gate_proj": Q4_K, "up_proj": Q4_K, "down_proj": IQ4_XS}),
    "of two types": ("mixtral", {"gate_proj": Q4_K, "up_proj": Q6_K, "down_proj": Q4_K}),
    "with biases": ("gpt_oss", {"gate_proj": MXFP4, "up_proj": MXFP4, "down_proj": MXFP4}),
}


@torch.no_grad()
@pytest.mark.parametrize("how", KINDS)
def test_blocks_compute_what_their_floats_do(how: str) -> None:
    name, kinds = KINDS[how]
    own = experts_of(name)
    given = inputs_for(own)
    stored = blocks(own, kinds)
    exact = grouped_experts(own, stored.weights(), "gguf", torch.float32, True)
    rounded = grouped_experts(own, stored.weights(), "gguf", torch.float32, False)
    assert len(exact.products) == (3 if how == "of two types" else 2)
    got, near = exact(*given), rounded(*given)
    assert_alone_as_in_company(exact, given)
    assert_alone_as_in_company(rounded, given)
    restored = restored_experts(stored, torch.float32)
    expected = restored(*given)
    assert restored is own
    assert error(got, expected) < 1e-5
    assert error(got, expected) < error(near, expected) < 0.02


CHECKPOINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "pack-quantized": (configuration("pack-quantized", INT4), packed),
    "W8A8": (with_inputs(configuration("int-quantized", INT8), TOKENS), signed),
}


def make_with(kind: str) -> Make:
    drawn: Any = {"bits": 8, "group": -1, "symmetric": True} if kind == "W8A8" else {}
    return make_all(CHECKPOINTS[kind][1], **drawn)


@torch.inference_mode()
@pytest.mark.parametrize("model_name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_layers_of_experts_are_gathered(kind: str, model_name: str, tmp_path: Path) -> None:
    names = ("w1", "w3", "w2") if model_name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    said, _ = CHECKPOINTS[kind]
    expected = write_folder(
        tmp_path, said, make_with(kind), model_name, torch.float32, experts=names
    )
    model = load_model(str(tmp_path), CPU)
    found = dict(packed_experts(model))
    assert len(found) == 2
    assert {each.method for each in found.values()} == {said["quant_method"]}
    ids = torch.arange(12)[None] + 20
    assert error(model(ids).logits, expected(ids).logits) < (0.05 if kind == "W8A8" else 1e-4)
    floats = load_model(str(tmp_path), CPU, packed=False)
    assert not any(isinstance(each, PackedExperts) for each in floats.modules())
    assert error(floats(ids).logits, expected(ids).logits) < 1e-4


@torch.inference_mode()
def test_experts_whose_features_have_orders_of_their_own_become_floats(tmp_path: Path) -> None:
    make = make_all(gptq, shuffled=True)
    expected = write_folder(tmp_path, GPTQ, make, "qwen3_moe", torch.float32)
    model, ids = load_model(str(tmp_path), CPU), torch.arange(12)[None] + 20
    assert not dict(packed_experts(model))
    assert error(model(ids).logits, expected(ids).logits) < 1e-4


def test_an_expert_that_lacks_its_codes_is_named_in_one_line(tmp_path: Path) -> None:
    write_folder(tmp_path, AWQ, make_with("awq"), "qwen3_moe", torch.float32)
    with stored_tensors(tmp_path) as tensors:
        for key in [key for key in tensors if ".experts.3.down_proj." in key]:
            del tensors[key]
    with pytest.raises(UnsupportedModelError, match="experts in floats beside others in few bits"):
        load_model(str(tmp_path), CPU)


# --- MXFP4 as gpt-oss is published ---


@torch.inference_mode()
def test_mxfp4_is_kept_as_it_is_published(tmp_path: Path) -> None:
    expected, ids = write_mxfp4(tmp_path, torch.float32), torch.arange(12)[None] + 20
    model = load_model(str(tmp_path), CPU)
    found = dict(packed_experts(model))
    assert [each.scheme for each in found.values()] == ["MXFP4", "MXFP4"]
    assert error(model(ids).logits, expected(ids).logits) < 1e-4
    floats = load_model(str(tmp_path), CPU, packed=False)
    assert error(floats(ids).logits, expected(ids).logits) < 1e-4


def test_an_exponent_of_no_number_is_named(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    with stored_tensors(tmp_path) as tensors:
        key = next(key for key in tensors if key.endswith("down_proj_scales"))
        tensors[key][1, 2, 0] = 255
    with pytest.raises(UnsupportedModelError, match=f"not finite: .*{key[-16:]}"):
        load_model(str(tmp_path), CPU)
