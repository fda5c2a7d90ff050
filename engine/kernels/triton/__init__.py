"""Programs for GPUs, written in Triton's language.

``ops`` is how torch calls them. Files with programs import triton and are imported where they run:
it need not be there. With ``TRITON_INTERPRET=1`` in the environment before triton is imported, programs
run on a CPU, as numpy: slow, and for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

LEAST_CAPABILITY = (8, 0)
"""The compute capability of devices from which on there are products of bfloat16."""


class Variant(NamedTuple):
    """Constants that a program is compiled for, by its own names, and how it is launched."""

    constants: dict[str, Any]
    launch: dict[str, Any]


def is_interpreted() -> bool:
    """Whether programs are interpreted, as triton reads its environment."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}


def num_processors(device: torch.device) -> int:
    """Returns how many programs run at once, at least."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def missing_for(device: torch.device) -> str | None:
    """Returns why programs cannot run there; None: they can."""
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
