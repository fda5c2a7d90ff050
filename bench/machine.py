"""Describes the measured machine."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Plain values for JSON: processor, threads, versions, whether the step is compiled (``setup.py``)
    and, on CUDA, the device and its memory."""
    step = find_spec("engine.core")
    machine: dict[str, Any] = {
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "isa": " ".join(_isa()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compiled": step is not None and not str(step.origin).endswith(".py"),
        "device": str(device),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["gpu_memory_bytes"] = total
        machine["gpu_memory_free_bytes"] = free
    return machine


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _isa() -> list[str]:
    """Returns the processor's flags that matter to matrix products; empty where it reports none."""
    families = ("avx", "amx", "fma", "f16c", "asimd", "sve", "i8mm", "bf16")
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return sorted(flag for flag in flags if flag.startswith(families))


def _cpuinfo(field: str) -> str | None:
    """The first processor's; None where there is no such field."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return None
