"""Compiles Triton's programs for a kind of device, without having one, and says what came out, for all
variants or those named:
``python compiled_ahead.py 90``. Fails where a program needs more shared memory than the smallest
devices of compute capability 8 have, or takes no tensor cores."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import ragged_attention as programs
from engine.kernels.triton.ops import attend_variant, join_variant, store_variant

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
TYPES = {torch.bfloat16: "bf16", torch.uint8: "u8"}
_INTS = {"slots": "*i64", "plan": "*i32", "joins": "*i32"}
_FLOATS = {"sums": "*fp32", "stats": "*fp32"}
_NUMBERS = {"scale", "softcap", "largest_key", "largest_value"}


def compiled(program: Any, variant: Any, dtype: str, stored: str, capability: int) -> Any:
    """As it is launched: pointers are aligned."""
    names = program.arg_names
    signature = {name: _type_of(name, variant.constants, dtype, stored) for name in names}
    attrs: Mapping[Any, Any] = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*")
    }
    constexprs = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=program, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.launch)


def _type_of(name: str, constants: Mapping[str, Any], dtype: str, stored: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("keys", "values"):
        return f"*{stored}"
    if name in ("query", "key", "value", "output", "sinks"):
        return f"*{dtype}"
    return {**_INTS, **_FLOATS}.get(name, "fp32" if name in _NUMBERS else "i32")


def main(capability: int, names: Sequence[str]) -> None:
    for name in names:
        asked = PLAIN | VARIANTS[name]
        variant = attend_variant(**asked)
        made = [(programs.attend, variant)]
        if asked["is_fp8"]:
            made.append((programs.join, join_variant(variant, asked["is_exact"])))
            made.append((programs.store_rows, store_variant(variant, asked["is_exact"])))
        for program, each in made:
            stored = "u8" if asked["is_fp8"] else "bf16"
            binary = compiled(program, each, "bf16", stored, capability)
            ptx, shared = binary.asm["ptx"], binary.metadata.shared
            assert len(binary.asm["cubin"]) > 0
            assert shared <= MOST_SHARED_BYTES, f"{name}: {shared} bytes of shared memory"
            if program is programs.attend:
                assert any(word in ptx for word in ("mma.sync", "wgmma", "tcgen05.mma")), name
            sys.stdout.write(f"compiled {program.__name__} for {name}: {shared} bytes shared\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or list(VARIANTS))
