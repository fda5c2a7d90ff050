"""Checkpoints of tiny models in every format that weights in few bits are published in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import nn

from worlds.gguf_files import tiny_llama, write_gguf
from worlds.packed_checkpoints import (
    FP8,
    INT4,
    TOKENS,
    Codes,
    Tensors,
    awq,
    configuration,
    draw,
    gptq,
    in_fp8,
    packed,
    signed,
    with_inputs,
    write_folder,
    write_mxfp4,
)

_GROUPS: dict[str, Any] = {"bits": 4, "group_size": 32}
_BY_CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
_Q6_K = ("token_embd", "output", "blk.0.attn_v", "blk.1.attn_output")
"""The tensors that have more bits in a mixture."""


def _gguf(
    folder: Path, kind: Kind, more: Mapping[str, Kind] | None = None, tied: bool = False
) -> Path:
    """Rows of 256 values, which all types fit, but for down projections of 288."""
    model = tiny_llama(hidden_size=256, intermediate_size=288, tie_word_embeddings=tied)
    return write_gguf(folder / "tiny.gguf", kind, model=model, kinds=more)


def _mixture(folder: Path, tied: bool) -> Path:
    more = {f"{each}.weight": Kind.Q6_K for each in _Q6_K}
    return _gguf(folder, Kind.Q4_K, more, tied)


def _folder(
    folder: Path,
    quantization: Mapping[str, Any],
    lay_out: Callable[[Codes], Tensors],
    model: str = "llama",
    **drawn: Any,
) -> Path:
    def make(name: str, linear: nn.Linear) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head":
            return None
        # Layers of one input have their groups in one order, as tools write them.
        groups = draw(1, linear.in_features, seed=linear.in_features, **drawn).group_of
        seed = sum(name.encode())
        codes = draw(linear.out_features, linear.in_features, seed=seed, **drawn)
        codes = codes._replace(group_of=groups)
        return lay_out(codes), codes.weight()

    write_folder(folder, quantization, make, model)
    return folder


def _gptq(folder: Path, bits: int, shuffled: bool) -> Path:
    said = _GROUPS | {"quant_method": "gptq", "bits": bits, "desc_act": shuffled, "sym": False}
    return _folder(folder, said, gptq, bits=bits, shuffled=shuffled)


def _mxfp4(folder: Path) -> Path:
    write_mxfp4(folder)
    return folder


def _awq(folder: Path, model: str = "llama") -> Path:
    return _folder(
        folder, _GROUPS | {"quant_method": "awq", "version": "gemm", "zero_point": True}, awq, model
    )


def _w4a16(folder: Path, by_channel: bool) -> Path:
    weights = _BY_CHANNEL if by_channel else INT4 | {"symmetric": True}
    return _folder(
        folder,
        configuration("pack-quantized", weights),
        partial(packed, symmetric=True),
        symmetric=True,
        group=-1 if by_channel else 32,
        scale_dtype=torch.bfloat16,
    )


def _w8a8(folder: Path) -> Path:
    return _folder(
        folder,
        with_inputs(configuration("int-quantized", _BY_CHANNEL | {"num_bits": 8}), TOKENS),
        signed,
        bits=8,
        group=-1,
        symmetric=True,
        scale_dtype=torch.bfloat16,
    )


def _fp8(folder: Path) -> Path:
    said = FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}
    write_folder(folder, said, in_fp8((32, 32)))
    return folder


FORMATS: dict[str, Callable[[Path], Path]] = {
    "Q4_0": partial(_gguf, kind=Kind.Q4_0),
    "Q4_1": partial(_gguf, kind=Kind.Q4_1),
    "Q5_K": partial(_gguf, kind=Kind.Q5_K),
    "Q8_0": partial(_gguf, kind=Kind.Q8_0, tied=True),
    "Q4_K_and_Q6_K": partial(_mixture, tied=False),
    "Q4_K_and_Q6_K_tied": partial(_mixture, tied=True),
    "awq": _awq,
    "awq_of_experts": partial(_awq, model="qwen3_moe"),
    "mxfp4": _mxfp4,
    "gptq_in_order": partial(_gptq, bits=4, shuffled=True),
    "gptq_8_bits": partial(_gptq, bits=8, shuffled=False),
    "w4a16": partial(_w4a16, by_channel=False),
    "w4a16_by_channel": partial(_w4a16, by_channel=True),
    "w8a8": _w8a8,
    "fp8": _fp8,
}
"""Each writes a checkpoint into a folder and returns what it is served by."""
FLOATS = ("fp8",)
"""Those that become floats as they are loaded."""
