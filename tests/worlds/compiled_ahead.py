"""Compiles Triton's programs for a kind of device, without having one, and says what came out, for all
variants or those named:
``python compiled_ahead.py 90``. Fails where a program needs more shared memory than the smallest
devices of compute capability 8 have, keeps more elsewhere for want of registers than is known, or takes
no tensor cores."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.copying import copying_variant
from engine.kernels.triton import (
    choice_programs,
    code_programs,
    copy_programs,
    expert_programs,
    joint_programs,
    row_programs,
)
from engine.kernels.triton import ragged_attention as programs
from engine.kernels.triton.choice_ops import choose_variant, score_variant
from engine.kernels.triton.code_ops import code_tile
from engine.kernels.triton.expert_ops import adding_variant, laying_variant
from engine.kernels.triton.joint_ops import ACTIVATIONS, gate_variant, heads_variant
from engine.kernels.triton.ops import attend_variant, join_variant, store_variant
from engine.kernels.triton.packed_codes import NUMBERS, format_of
from engine.kernels.triton.row_ops import adding_tile, norm_tile, product_tile
from worlds.grouped_weights import drawn_weight

MOST_SHARED_BYTES = 99 << 10
BF16 = torch.bfloat16
PLAIN: dict[str, Any] = {
    "dtype": BF16,
    "share": 4,
    "key_dim": 128,
    "value_dim": 128,
    "block_size": 16,
    "tile_rows": 4,
    "chunk": 512,
    "window": 0,
    "softcap": 0.0,
    "has_sinks": False,
    "is_fp8": False,
    "is_exact": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "8 B, one row each": {},
    "8 B, drafts": {"tile_rows": 8},
    "8 B, prompts": {"tile_rows": 16},
    "8 B, exact": {"tile_rows": 16, "is_exact": True},
    "8 B, 8-bit floats": {"tile_rows": 8, "is_fp8": True},
    "gpt-oss": {"key_dim": 64, "value_dim": 64, "share": 8, "window": 128, "has_sinks": True},
    "gemma 2": {"key_dim": 256, "value_dim": 256, "share": 2, "window": 4096, "softcap": 50.0},
}
ROWS: dict[str, tuple[torch.dtype, bool, int, int]] = {
    "products, divided": (BF16, True, 4096, 4096),
    "products, bf16": (BF16, False, 4096, 14336),
    "products, few outputs": (BF16, True, 4096, 1024),
    "products, fp16": (torch.float16, False, 4096, 14336),
    "products, fp32": (torch.float32, False, 4096, 14336),
}
"""Programs for rows with weights: types, whether chunks of inputs go to several programs, inputs and
outputs."""
EXPERTS = ("codes, experts", "codes, experts, more rows")
CODES: dict[str, tuple[str, torch.dtype, int, int]] = {
    "codes, Q4_0": ("Q4_0", BF16, 1, 4096),
    "codes, Q4_K": ("Q4_K", BF16, 16, 4096),
    "codes, Q4_K, more rows": ("Q4_K", BF16, 17, 4096),
    "codes, Q4_K, fp32": ("Q4_K", torch.float32, 17, 4096),
    "codes, Q6_K": ("Q6_K", BF16, 17, 4096),
    "codes, AWQ": ("AWQ", torch.float16, 17, 4096),
    "codes, part of a unit": ("Q4_1", BF16, 17, 1568),
    "codes, W8A8": ("W8A8", torch.float16, 17, 4096),
    "codes, fp8": ("e4m3", BF16, 17, 4096),
    EXPERTS[0]: ("Q4_K", BF16, 16, 2048),
    EXPERTS[1]: ("Q4_0", BF16, 32, 2048),
}
"""Programs for rows with weights in few bits: schemes, types of rows, rows and inputs."""
JOINT: list[dict[str, Any]] = [
    {"NUM_CHUNKS": 1, "HAS_BIAS": False},
    {"NUM_CHUNKS": 3, "HAS_BIAS": True},
]
"""Products that passes read: whole, and in chunks with a bias."""
TYPES = {BF16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NUMBER_TYPES = {
    torch.uint8: "u8", torch.int8: "i8", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float32: "fp32",
}  # fmt: skip
_INTS = {"codes": "*i16", "slots": "*i64", "plan": "*i32", "joins": "*i32", "best_tokens": "*i32"}
_INTS |= dict.fromkeys(("noise_keys", "noise_positions", "chosen", "tokens", "drafted"), "*i64")
_INTS |= {"told": "*i32", "texts": "*i32"} | dict.fromkeys(("pairs", "blocks", "experts"), "*i64")
_FLOATS = dict.fromkeys(("sums", "stats", "factors", "weights"), "*fp32")
_DOUBLES = dict.fromkeys(("scores", "temperatures"), "*fp64")
_NUMBERS = {"scale", "softcap", "largest_key", "largest_value", "epsilon"}
_OF_ROWS = {"query", "key", "value", "output", "sinks", "rows", "weight", "bias", "chunks"}
_OF_ROWS |= {"residual", "hidden", "cosines", "sines", "logits"}
SPILLING = {(80, "8 B, prompts"): 656, (80, "8 B, exact"): 656} | {
    (80, f"8 B, {name}"): 8 for name in ("one row each", "drafts", "8-bit floats")
}
"""Bytes that programs do keep elsewhere for want of registers, by capability and variant: at most."""
_MULTIPLYING = (programs.attend, row_programs.multiply, code_programs.multiply_codes)
_MULTIPLIES = re.compile(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[.\w]*")
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def compiled(program: Any, variant: Any, dtype: str, stored: str, capability: int) -> Any:
    """As it is launched: pointers are aligned, and so are a layer's sizes. With what the assembler says
    of registers."""
    names = program.arg_names
    signature = {name: _type_of(name, variant.constants, dtype, stored) for name in names}
    sizes = {"in_features", "out_features", "weight_row_stride", "row_stride"}
    attrs: Mapping[Any, Any] = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in sizes
    }
    constexprs = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=program, signature=signature, constexprs=constexprs, attrs=attrs)
    target, said = GPUTarget("cuda", capability, 32), io.StringIO()
    triton.knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(said):
        binary = triton.compile(source, target=target, options=variant.launch)
    return binary, said.getvalue()


def _type_of(name: str, constants: Mapping[str, Any], dtype: str, stored: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("keys", "values"):
        return f"*{stored}"
    if name in NUMBERS:
        return f"*{dict(word.split() for word in stored.split(','))[name]}"
    is_in_chunks = constants.get("NUM_CHUNKS", 1) > 1 and name in ("rows", "chunks")
    if is_in_chunks or (constants.get("IS_DIVIDED") and name == "output"):
        return "*fp32"
    if name in _OF_ROWS:
        return f"*{dtype}"
    return {**_INTS, **_FLOATS, **_DOUBLES}.get(name, "fp32" if name in _NUMBERS else "i32")


def _made_for(name: str) -> Iterator[tuple[Any, Any, str, str]]:
    """Programs with what they are compiled for: their sizes, and types of rows and of what is stored."""
    if name in ROWS:
        dtype, is_divided, in_features, out_features = ROWS[name]
        tile = product_tile(dtype, in_features, out_features)
        asked = {"HAS_BIAS": True, "IS_DIVIDED": is_divided, "weight_column_stride": 1}
        asked_tile = tile._replace(constants=tile.constants | asked)
        yield row_programs.multiply, asked_tile, TYPES[dtype], ""
        if name == "products, divided":
            adding = adding_tile(4)
            adding = adding._replace(constants=adding.constants | {"HAS_BIAS": True})
            yield row_programs.add_chunks, adding, TYPES[dtype], ""
            norm = norm_tile(4096)
            for is_sum in (False, True):
                asked = {"IS_ROUNDED": True, "HAS_RESIDUAL": is_sum} | JOINT[is_sum]
                asked_norm = norm._replace(constants=norm.constants | asked)
                yield row_programs.normalize, asked_norm, TYPES[dtype], ""
        return
    if name == "passes":
        for is_fp8 in (False, True):
            for joint in JOINT:
                heads = heads_variant(32, 8, 128, is_fp8)
                heads = heads._replace(constants=heads.constants | joint | {"NORM": 2})
                yield joint_programs.rotate_and_store, heads, "bf16", "u8" if is_fp8 else "bf16"
        for activation, joint in zip(ACTIVATIONS, JOINT, strict=True):
            gate = gate_variant(activation)
            gate = gate._replace(constants=gate.constants | joint)
            yield joint_programs.gate, gate, "bf16", ""
        for logits in (*TYPES.values(), "fp64"):
            yield choice_programs.score, score_variant(), logits, ""
        yield choice_programs.choose, choose_variant(149), "bf16", ""
        return
    if name == "experts":
        for num_pairs in (8, 4096):
            yield expert_programs.lay_pairs, laying_variant(num_pairs, 128, 16), "bf16", ""
        yield expert_programs.add_outputs, adding_variant(8), "bf16", ""
        return
    if name == "copies":
        for most_nodes in (4, 64):
            yield copy_programs.copy_drafts, copying_variant(most_nodes), "i64", ""
        return
    if name in CODES:
        scheme, dtype, num_rows, in_features = CODES[name]
        weight = drawn_weight(scheme if scheme != "e4m3" else "compressed-tensors", 1, 4096)
        kind = format_of(weight)
        if scheme == "e4m3":
            kind = kind._replace(bits=8, kind="e4m3", zero=0, span=128)
        tile = code_tile(kind._replace(in_features=in_features), num_rows, 4096)
        lacking = dict.fromkeys({*NUMBERS} - {each for each, _ in kind.numbers})
        # A launch makes constants of ones, too.
        one = {"pairs": None, "blocks": None, "num_chosen": 1, "num_experts": 1}
        lacking |= {"bias": None} if name in EXPERTS else one
        tile = tile._replace(constants=tile.constants | lacking | {"IS_DIVIDED": True})
        stored = ",".join(f"{each} {_NUMBER_TYPES[dtype]}" for each, dtype in kind.numbers)
        yield code_programs.multiply_codes, tile, TYPES[dtype], stored
        return
    asked = PLAIN | VARIANTS[name]
    variant, is_exact = attend_variant(**asked), asked["is_exact"]
    stored = "u8" if asked["is_fp8"] else "bf16"
    yield programs.attend, variant, "bf16", stored
    if asked["is_fp8"]:
        yield programs.join, join_variant(variant, is_exact), "bf16", stored
        yield programs.store_rows, store_variant(4, 128, 128, True), "bf16", stored


def main(capability: int, names: Sequence[str]) -> None:
    for name in names:
        for program, variant, dtype, stored in _made_for(name):
            binary, said = compiled(program, variant, dtype, stored, capability)
            ptx, shared = binary.asm["ptx"], binary.metadata.shared
            assert len(binary.asm["cubin"]) > 0
            assert shared <= MOST_SHARED_BYTES, f"{name}: {shared} bytes of shared memory"
            ((_, spilled, _),) = _SPILLED.findall(said)
            assert int(spilled) <= SPILLING.get((capability, name), 0), f"{name}: {said}"
            if program in _MULTIPLYING and dtype != "fp32":
                assert any(word in ptx for word in ("mma.sync", "wgmma", "tcgen05.mma")), name
            if program is code_programs.multiply_codes and dtype != "fp32":
                # In tiles of every size an output comes from one instruction.
                used = set(_MULTIPLIES.findall(ptx))
                assert {each[:25] for each in used} == {"mma.sync.aligned.m16n8k16"}, used
            sys.stdout.write(f"compiled {program.__name__} for {name}: {shared} bytes shared\n")


if __name__ == "__main__":
    main(
        int(sys.argv[1]), sys.argv[2:] or [*VARIANTS, *ROWS, *CODES, "passes", "copies", "experts"]
    )
