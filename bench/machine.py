"""What the figures were taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Plain values for JSON: processor, threads, versions and, on CUDA, the device and its
    memory."""
    machine: dict[str, Any] = {
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["gpu_memory_bytes"] = total
        machine["gpu_memory_free_bytes"] = free
    return machine


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
