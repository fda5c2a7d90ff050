"""Compiles loops that every engine on a CPU needs in a second process, while the engine compiles others:
on a machine that has none yet. They meet in the folder that compiled loops are kept in.

    python -m engine.kernels.ahead TYPE

It ends when its standard input does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from compiled.cache import folder_of
from compiled.loops import Loop
from engine.kernels import find_kernel
from engine.kernels.compiled import kernels_version

logger = logging.getLogger(__name__)

_MODULES_OF_LOOPS = (
    "copying.alignment_loops",
    "copying.draft_loops",
    "merged.grow_loops",
    "merged.row_loops",
    "copying.index_loops",
)
"""Drafters' modules, the slowest to compile first. What several of them call is compiled once."""


@contextmanager
def compiling_ahead(device: str, dtype: str) -> Iterator[None]:
    """Within it, where nothing is compiled yet, the second process works. Both: the settings."""
    folder = folder_of(kernels_version())
    if device != "cpu" or folder.exists():
        yield
        return
    logger.info("compiling for this CPU, half a minute or so: once, kept in %s", folder.parent)
    if dtype == "auto":
        has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtype = "bfloat16" if has_bfloat16 else "float32"
    command = [sys.executable, "-P", "-m", __name__, dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    threading.Thread(target=lambda: sys.stdin.read() or os._exit(1), daemon=True).start()
    _compile_kernel("paged_attention", "attend")
    for name in _MODULES_OF_LOOPS:
        for each in vars(import_module(f"drafters.{name}")).values():
            if isinstance(each, Loop):
                each.compile()
    _compile_kernel("draft_tokens", "suggest")
    _compile_kernel("gumbel_argmax", "search")


def _compile_kernel(name: str, attribute: str) -> None:
    kernel = getattr(find_kernel(name), attribute)
    dtypes = (getattr(torch, sys.argv[1]),) * len(kernel.layout.floats)
    kernel.loop(dtypes).compile()


if __name__ == "__main__":
    main()
