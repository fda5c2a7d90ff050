"""Memory that the machine has left. Needs no torch."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns what the kernel calls available, within the container's limit. ``cgroup``: the folder
    where the kernel says that."""
    return min(_available(), _cgroup_left(cgroup))


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 30


def _cgroup_left(cgroup: Path) -> int:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    # The kernel counts files that were read, as weights are, and gives them up where memory is wanted.
    used -= int(counts.get("inactive_file", 0))
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
