"""Facts about a device: memory left for keys and values, and instructions. And rights of files."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

from engine.hub.memory import available_bytes


def free_bytes(device: torch.device) -> int:
    """Returns the bytes free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()


def check_device(device: str) -> None:
    """Raises ValueError where torch does not have this device here."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return
    if torch.version.cuda is None:
        raise ValueError(f"device {device}: torch {torch.__version__} here is a build without CUDA")
    with warnings.catch_warnings():
        # What torch has to say of a driver is for the message.
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(f"device {device}: torch finds no CUDA device here")
    if int(number or 0) >= count:
        raise ValueError(
            f"device {device}: there are {count} CUDA devices here, the last is {count - 1}"
        )


def release_memory() -> None:
    """Gives the system what the C library keeps of freed memory: places of weights that are replaced one
    by one leave gaps, which would add up to a third of a model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def let_others_read(path: Path) -> None:
    """Gives a file the rights that a new one has: safetensors leaves its own to their owner alone, and a
    server under another user could not read them."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def device_memory(device: str) -> dict[str, float]:
    """Returns the bytes used and free on a GPU, and allocated by this process; nothing off CUDA."""
    if not device.startswith("cuda"):
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "used": float(total - free),
        "free": float(free),
        "allocated": float(torch.cuda.memory_allocated(device)),
    }


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these are bf16 and a CPU that has instructions for it: there packed weights and attention
    written out are the fastest, whatever the determinism."""
    return device.type == "cpu" and dtype == torch.bfloat16 and onednn_packs(dtype)


def has_tiles() -> bool:
    """Whether the CPU multiplies tiles of 16 bits (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of a type of 16 bits. Settings of its own may keep it from using what
    the CPU has."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
