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
    attention = find_kernel("paged_attention")
    dtypes = (getattr(torch, sys.argv[1]),) * len(attention.attend.layout.floats)
    attention.attend.loop(dtypes).compile()
    for name in ("alignment_loops", "draft_loops", "index_loops"):
        for each in vars(import_module(f"drafters.copying.{name}")).values():
            if isinstance(each, Loop):
                each.compile()


if __name__ == "__main__":
    main()
