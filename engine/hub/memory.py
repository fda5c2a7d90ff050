"""Memory that the machine has left. Needs no torch."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Returns what the kernel calls available, within the container's limit."""
    return min(_available(), _cgroup_left())


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
