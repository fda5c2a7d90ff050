"""The host's memory, as the kernel tells of it. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Returns the bytes free now: what the kernel calls available, within the container's limit."""
    return min(_available(), _cgroup_left())


def own_bytes(pid: int) -> int:
    """Returns the bytes that a process has for itself: without those of files, which the kernel gives to
    others who need them. 0: it has gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 30


def _cgroup_left() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
