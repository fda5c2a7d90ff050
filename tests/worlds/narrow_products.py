"""Products in 8 bits as CPUs with VNNI and without AVX-512 compute them: a process of its own, since code
is compiled once in a process.

    python -m worlds.narrow_products FOLDER

Reads ``given.pt`` there, writes ``got.pt``: products, and the instructions that were compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from engine.kernels import instructions as asm
from engine.kernels import integers
from engine.model.int8 import Int8Product, Int8Weight


def main(folder: Path) -> None:
    instructions = set()
    called = asm.called

    def noted(builder: object, name: str, *values: object) -> object:
        if name.startswith("llvm.x86"):
            instructions.add(name)
        return called(builder, name, *values)

    asm.called = noted  # type: ignore[assignment]
    integers.is_wide = lambda: False
    weights, rows = torch.load(folder / "given.pt")
    products = [Int8Product([Int8Weight(*each)], [None], torch.float32)(rows) for each in weights]
    torch.save((products, sorted(instructions)), folder / "got.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
