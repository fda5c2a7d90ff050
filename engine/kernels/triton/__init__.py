"""Programs for GPUs, written in Triton's language.

``ops`` is how torch calls them. Files with programs import triton and are imported where they run:
it need not be there. With ``TRITON_INTERPRET=1`` in the environment before triton is imported, programs
run on a CPU, as numpy: slow, and for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

LEAST_CAPABILITY = (8, 0)
"""Of devices: from here on there are products of bfloat16."""


def is_interpreted() -> bool:
    """As triton reads its environment."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}


def missing_for(device: torch.device) -> str | None:
    """Why programs cannot run there; None: they can."""
    if find_spec("triton") is None:
        return "it needs triton, which is not installed"
    if device.type != "cuda":
        needed = "on a CPU it runs under Triton's interpreter alone: set TRITON_INTERPRET=1"
        return None if is_interpreted() else needed
    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    if is_interpreted():
        return "TRITON_INTERPRET is set, which is for CPUs"
    found = torch.cuda.get_device_capability(device)
    if torch.version.cuda is not None and found < LEAST_CAPABILITY:
        least, mine = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, found))
        return f"it needs a device of compute capability {least}, not {mine}"
    return None
