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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import ragged_attention as programs
from engine.kernels.triton import row_programs
from engine.kernels.triton.ops import attend_variant, join_variant, store_variant
from engine.kernels.triton.row_ops import adding_tile, norm_tile, product_tile

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
"""Of rows with weights: types, whether chunks of inputs go to several programs, inputs and outputs."""
TYPES = {BF16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INTS = {"slots": "*i64", "plan": "*i32", "joins": "*i32"}
_FLOATS = {"sums": "*fp32", "stats": "*fp32", "factors": "*fp32"}
_NUMBERS = {"scale", "softcap", "largest_key", "largest_value", "epsilon"}
_OF_ROWS = {"query", "key", "value", "output", "sinks", "rows", "weight", "bias"}
SPILLING = {(80, "8 B, prompts"): 656, (80, "8 B, exact"): 656} | {
    (80, f"8 B, {name}"): 8 for name in ("one row each", "drafts", "8-bit floats")
}
"""Bytes that programs do keep elsewhere for want of registers, by capability and variant: at most."""
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def compiled(program: Any, variant: Any, dtype: str, stored: str, capability: int) -> Any:
    """As it is launched: pointers are aligned, and so are a layer's sizes. With what the assembler says
    of registers."""
    names = program.arg_names
    signature = {name: _type_of(name, variant.constants, dtype, stored) for name in names}
    sizes = {"in_features", "out_features", "weight_row_stride"}
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
    if name in _OF_ROWS:
        return f"*{dtype}"
    return {**_INTS, **_FLOATS}.get(name, "fp32" if name in _NUMBERS else "i32")


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
            norm = norm._replace(constants=norm.constants | {"IS_ROUNDED": True})
            yield row_programs.normalize, norm, TYPES[dtype], ""
        return
    asked = PLAIN | VARIANTS[name]
    variant, is_exact = attend_variant(**asked), asked["is_exact"]
    stored = "u8" if asked["is_fp8"] else "bf16"
    yield programs.attend, variant, "bf16", stored
    if asked["is_fp8"]:
        yield programs.join, join_variant(variant, is_exact), "bf16", stored
        yield programs.store_rows, store_variant(variant, is_exact), "bf16", stored


def main(capability: int, names: Sequence[str]) -> None:
    for name in names:
        for program, variant, dtype, stored in _made_for(name):
            binary, said = compiled(program, variant, dtype, stored, capability)
            ptx, shared = binary.asm["ptx"], binary.metadata.shared
            assert len(binary.asm["cubin"]) > 0
            assert shared <= MOST_SHARED_BYTES, f"{name}: {shared} bytes of shared memory"
            ((_, spilled, _),) = _SPILLED.findall(said)
            assert int(spilled) <= SPILLING.get((capability, name), 0), f"{name}: {said}"
            if program in (programs.attend, row_programs.multiply) and dtype != "fp32":
                assert any(word in ptx for word in ("mma.sync", "wgmma", "tcgen05.mma")), name
            sys.stdout.write(f"compiled {program.__name__} for {name}: {shared} bytes shared\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or [*VARIANTS, *ROWS])
