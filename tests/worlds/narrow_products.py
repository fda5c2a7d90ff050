"""Products in few bits as CPUs without AVX-512 compute them, with VNNI or without: a process of its own,
since code is compiled once in a process.

    python -m worlds.narrow_products FOLDER NARROW|PAIRS

Reads ``given.pt`` there, writes ``got.pt``: products, and the instructions that were compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from engine.kernels import instructions as asm
from engine.kernels import integers
from engine.kernels.grouped_product import product
from engine.kernels.grouped_weight import GroupedWeight
from engine.kernels.packing import pack


def main(folder: Path, instruction: str) -> None:
    instructions = set()
    called = asm.called

    def noted(builder: object, name: str, *values: object) -> object:
        if name.startswith("llvm.x86"):
            instructions.add(name)
        return called(builder, name, *values)

    asm.called = noted  # type: ignore[assignment]
    integers.is_wide = lambda: False
    integers.has_integer_products = lambda: instruction == "NARROW"
    weights, rows = torch.load(folder / "given.pt")
    packed = [pack([GroupedWeight(*each)], *each[0].shape) for each in weights]
    products = [product(rows, each, torch.float32) for each in packed]
    torch.save((products, sorted(instructions)), folder / "got.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
