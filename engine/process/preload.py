"""Libraries that make the forward faster on a CPU, loaded before all others into the engine's process.

Intel's OpenMP keeps its workers at hand where GNU's puts them to sleep or starts a second team, and a
malloc that caches per thread does without the page faults of large short-lived tensors.
"""

from __future__ import annotations

import os
import platform
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_MALLOCS = ("tcmalloc_minimal", "tcmalloc", "jemalloc")
"""Mallocs that cache per thread, by the names the loader knows them by; the first that there is."""


def preload_environment() -> dict[str, str]:
    """Variables for a process that is to have what this machine offers: none where there is nothing, and
    what is preloaded already comes first."""
    if platform.system() != "Linux":
        return {}
    given = os.environ.get("LD_PRELOAD", "")
    malloc = next(filter(None, map(find_library, _MALLOCS)), None)
    found = [each for each in (_intel_openmp(), malloc) if each and Path(each).name not in given]
    return {"LD_PRELOAD": ":".join(filter(None, [given, *found]))} if found else {}


def _intel_openmp() -> str | None:
    """The library of the distribution ``intel-openmp``, which the extra ``cpu`` brings."""
    try:
        installed = files("intel-openmp") or []
    except PackageNotFoundError:
        return None
    paths = (Path(str(each.locate())) for each in installed if each.name == "libiomp5.so")
    return next((str(path.resolve()) for path in paths if path.is_file()), None)
