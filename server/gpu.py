"""Memory of the engine's CUDA device, for metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def gpu_memory_reader(device: str) -> Callable[[], Mapping[str, float]] | None:
    """Reads bytes used and free on the device, and allocated by this process; None off CUDA."""
    if not device.startswith("cuda"):
        return None
    import torch

    def read() -> Mapping[str, float]:
        free, total = torch.cuda.mem_get_info(device)
        return {
            "used": float(total - free),
            "free": float(free),
            "allocated": float(torch.cuda.memory_allocated(device)),
        }

    return read
