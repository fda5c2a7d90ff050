"""Checkpoints of every format: variants that are read mean what was packed, others are refused in one
line that names what is not served, missing or of another size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.formats import read_places
from worlds.changed_folders import stored_tensors
from worlds.packed_checkpoints import (
    AWQ,
    FP8,
    GPTQ,
    INT4,
    INT8,
    TOKENS,
    Make,
    Tensors,
    awq,
    checked_places,
    configuration,
    draw,
    draw_fp8,
    fill,
    gptq,
    in_fp8,
    load,
    make_all,
    packed,
    signed,
    with_inputs,
    write_folder,
)
from worlds.tiny_models import CPU


def packed_as(**weights: Any) -> dict[str, Any]:
    return configuration("pack-quantized", INT4 | weights)


def of_gptq(bits: int, version: int, is_shuffled: bool) -> tuple[dict[str, Any], Make, str]:
    make = make_all(partial(gptq, v2=version == 2), head=True, bits=bits, shuffled=is_shuffled)
    layout = "gptq" if version == 1 else "gptq_v2"
    found = GPTQ | {"bits": bits, "checkpoint_format": layout, "desc_act": is_shuffled}
    return found | {"lm_head": True}, make, f"{bits} bits, groups of 32, zero points"


IN_4_BITS = "4 bits, groups of 32, zero points"
SYMMETRIC = partial(packed, symmetric=True)
CASES: dict[str, tuple[dict[str, Any], Make, str]] = {
    "awq": (AWQ, make_all(awq), IN_4_BITS),
    **{
        f"gptq v{version} {bits} bits with head{' shuffled' * is_shuffled}": of_gptq(
            bits, version, is_shuffled
        )
        for version in (1, 2)
        for bits in (4, 8)
        for is_shuffled in (False, True)
    },
    "packed": (packed_as(), make_all(packed), IN_4_BITS),
    "packed symmetric scales in bf16": (
        packed_as(symmetric=True),
        make_all(SYMMETRIC, symmetric=True, scale_dtype=torch.bfloat16),
        "4 bits, groups of 32",
    ),
    "packed by channel scales in float32": (
        configuration("pack-quantized", INT8),
        make_all(SYMMETRIC, bits=8, group=-1, symmetric=True, scale_dtype=torch.float32),
        "8 bits, a scale per channel",
    ),
    "packed shuffled": (
        packed_as(actorder="group"),
        make_all(packed, shuffled=True),
        IN_4_BITS,
    ),
    "packed with head": (
        configuration("pack-quantized", INT4, ignore=[]),
        make_all(packed, head=True),
        IN_4_BITS,
    ),
    "bytes by channel and tokens": (
        with_inputs(configuration("int-quantized", INT8), TOKENS),
        make_all(signed, bits=8, group=-1, symmetric=True, scale_dtype=torch.bfloat16),
        "8 bits, a scale per channel",
    ),
    "bytes by group": (
        with_inputs(
            configuration("int-quantized", INT8 | {"strategy": "group", "group_size": 32}), TOKENS
        ),
        make_all(signed, bits=8, symmetric=True),
        "8 bits, groups of 32",
    ),
    "bytes with zero points": (
        configuration("naive-quantized", INT8 | {"symmetric": False}),
        make_all(lambda codes: signed(codes, False), bits=8, group=-1),
        "8 bits, a scale per channel, zero points",
    ),
    "fp8": (
        FP8 | {"weight_block_size": [32, 48], "modules_to_not_convert": ["lm_head"]},
        in_fp8((32, 48)),
        "FP8, blocks of 32 x 48",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_means_the_weights_that_were_packed(tmp_path: Path, case: str) -> None:
    """Some of Qwen 2's layers have biases. A head keeps its type unless it has codes."""
    found, make, scheme = CASES[case]
    sizes = {"vocab_size": 96} if "gptq" in case else {}
    expected = write_folder(tmp_path, found, make, "qwen2", **sizes)
    model = load(tmp_path)
    assert model.dtype == torch.bfloat16
    places = checked_places(model, expected)
    assert len(places) == 2 * 7 + ("head" in case)
    assert {each.scheme for each in places.values()} == {scheme}
    orders = {getattr(each, "order", None) is not None for each in places.values()}
    assert orders == {"shuffled" in case}
    for name, place in places.items() if case == "fp8" else ():
        weight = expected.get_submodule(name).weight
        assert torch.equal(place.dequantized(torch.bfloat16), weight.bfloat16())


# --- what is refused ---


# By the fault that is said.
REFUSED: dict[str, dict[str, Any]] = {
    rf"^quantization_config \({each['quant_method']}\) has {fault}": each | changes
    for each, variants in (
        (
            AWQ,
            {
                "bits=8; served: 4": {"bits": 8},
                "bits='4'; served: 4": {"bits": "4"},
                "version='gemv'; served: gemm": {"version": "gemv"},
                "version='marlin'; served: gemm": {"version": "marlin"},
                "group_size=0; served: multiples of 32, and -1": {"group_size": 0},
                "group_size=-128": {"group_size": -128},
                "zero_point='yes'; served: true, false": {"zero_point": "yes"},
            },
        ),
        (
            GPTQ,
            {
                "bits=3; served: 4, 8": {"bits": 3},
                "bits=True": {"bits": True},
                "bits=None": {"bits": None},
                "group_size=16; served: multiples of 32, and -1": {"group_size": 16},
                "checkpoint_format='marlin'; served: gptq, gptq_v2": {
                    "checkpoint_format": "marlin"
                },
                "is_marlin_format=True": {"is_marlin_format": True},
                "pack_dtype='int64'; served: int32": {"pack_dtype": "int64"},
                r"dynamic=\[1\]; served: an object of patterns": {"dynamic": [1]},
                r"dynamic with the pattern '\(', which is none": {"dynamic": {"+:(": {}}},
            },
        ),
        (
            FP8,
            {
                "activation_scheme='none'; served: dynamic, static": {"activation_scheme": "none"},
                r"weight_block_size=\[128\]; served: two positive": {"weight_block_size": [128]},
                r"weight_block_size=\[0, 128\]": {"weight_block_size": [0, 128]},
                "weight_block_size='128'": {"weight_block_size": "128"},
                "expert_dtype='fp4'; served: fp8": {"expert_dtype": "fp4"},
                "modules_to_not_convert='lm_head'; served: a": {
                    "modules_to_not_convert": "lm_head"
                },
            },
        ),
    )
    for fault, changes in variants.items()
} | {
    r"dynamic '\+:a', has bits=2; served: 4, 8": GPTQ | {"dynamic": {"+:a": {"bits": 2}}},
    r"config group 'group_0': weights has num_bits=2; served: 4, 8": packed_as(num_bits=2),
    "weights has num_bits=4; served: 8": configuration("int-quantized", INT4),
    "weights has group_size=16; served: multiples of 32": packed_as(group_size=16),
    "weights has group_size=None; served: multiples of 32": packed_as(group_size=None),
    "has format='nvfp4-pack-quantized'; served: pack-quantized, int-quantized, float-quantized": (
        configuration("nvfp4-pack-quantized", INT8 | {"num_bits": 4, "type": "float"})
    ),
    "sparsity_config has format='sparse-24-bitmask'; served: dense": configuration(
        "pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}
    ),
    "has transform_config={.*; served: nothing": configuration(
        "pack-quantized", INT4, transform_config={"config_groups": {"R1": {}}}
    ),
    "has input_activations={.*; served: nothing with packed weights": with_inputs(
        packed_as(), TOKENS
    ),
    "input_activations has dynamic=False; served: True": with_inputs(
        configuration("int-quantized", INT8), TOKENS | {"dynamic": False}
    ),
    r"has ignore with the pattern '\(', which is none": configuration(
        "pack-quantized", INT4, ignore=["re:("]
    ),
    "has config_groups={}; served: groups of layers": configuration(
        "pack-quantized", INT4, config_groups={}
    ),
    "config group 'group_0': weights is None instead of an object": configuration(
        "pack-quantized",
        None,  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_variants_that_are_not_served_are_said(fault: str) -> None:
    with pytest.raises(UnsupportedModelError, match=fault) as refused:
        read_places(SimpleNamespace(quantization_config=REFUSED[fault]))
    assert "\n" not in str(refused.value)


UP = "model.layers.1.mlp.up_proj"
WEIGHT = f"{UP}.weight"
FAULTS: dict[str, tuple[dict[str, Any], Make, dict[str, torch.Tensor | None]]] = {
    # Sizes that the configuration does not give.
    r"self_attn.q_proj.qzeros \[2, 8\] instead of \[1, 8\]": (
        AWQ | {"group_size": 64},
        make_all(awq),
        {},
    ),
    r"self_attn.q_proj.qweight \[8, 64\] instead of \[16, 64\]": (
        GPTQ | {"bits": 8},
        make_all(gptq),
        {},
    ),
    rf"missing: {UP}\.weight.*not in the conf": (GPTQ, make_all(gptq), {f"{UP}.qweight": None}),
} | {
    fault: (packed_as(), make_all(packed), changes)
    for fault, changes in {
        f"are missing: {WEIGHT}_scale": {f"{WEIGHT}_scale": None},
        f"are missing: {WEIGHT}_zero_point": {f"{WEIGHT}_zero_point": None},
        rf"{WEIGHT}_scale \[96, 1\] instead of \[96, 2\]": {f"{WEIGHT}_scale": torch.ones(96, 1)},
        f"{WEIGHT}_packed is of float32 instead of int32": {f"{WEIGHT}_packed": torch.ones(96, 8)},
        r"weight_shape says \[96, 63\] instead of \[96, 64\]": {
            f"{WEIGHT}_shape": torch.tensor([96, 63])
        },
        f"not finite: {WEIGHT}_scale": {f"{WEIGHT}_scale": torch.full((96, 2), torch.nan).half()},
        f"{WEIGHT}_g_idx does not give each of 2 groups 32 features": {
            f"{WEIGHT}_g_idx": torch.full((64,), 2**30).int()
        },
        f"not in the configuration: {WEIGHT}_rotation": {f"{WEIGHT}_rotation": torch.ones(3)},
        "lm_head.weight is of int8, which quantization_config does not explain": {
            "lm_head.weight": torch.ones(97, 64, dtype=torch.int8)
        },
    }.items()
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_whose_tensors_do_not_fit_is_named_with_them(tmp_path: Path, fault: str) -> None:
    found, make, changes = FAULTS[fault]
    write_folder(tmp_path, found, make)
    with stored_tensors(tmp_path) as tensors:
        for name, each in changes.items():
            if each is None:
                del tensors[name]
            else:
                tensors[name] = each
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path}.*{fault}") as refused:
        load_model(str(tmp_path), CPU)
    assert "\n" not in str(refused.value)


def of_floats(*left_out: str) -> Tensors:
    codes, scales, _ = draw_fp8(nn.Linear(64, 8), (8, 32))
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_inv": scales}
    return {name: each for name, each in tensors.items() if name not in left_out}


CODES = awq(draw(16, 64))
ODD_LAYERS: dict[str, tuple[dict[str, Any], Tensors, nn.Linear]] = {
    "does not divide into groups of 64 features": (
        AWQ | {"group_size": 64},
        awq(draw(16, 96)),
        nn.Linear(96, 16),
    ),
    r"missing: up\.scales": (
        AWQ,
        {name: each for name, each in CODES.items() if name != "scales"},
        nn.Linear(64, 16),
    ),
    r"missing: up\.weight_scale": (
        FP8,
        of_floats("weight_scale", "weight_scale_inv"),
        nn.Linear(64, 8),
    ),
    "neither one nor one for each channel": (FP8, of_floats("weight_scale_inv"), nn.Linear(64, 8)),
    r"weight_scale_inv \[1, 2\] instead of \[2, 4\]": (
        FP8 | {"weight_block_size": [4, 16]},
        of_floats("weight_scale"),
        nn.Linear(64, 8),
    ),
}


@pytest.mark.parametrize("fault", ODD_LAYERS)
def test_a_layer_whose_tensors_do_not_fit_is_named_with_them(fault: str) -> None:
    found, tensors, linear = ODD_LAYERS[fault]
    plan = read_places(SimpleNamespace(quantization_config=found))
    assert plan is not None
    with pytest.raises(UnsupportedModelError, match=fault):
        fill(plan.place, linear, tensors)
