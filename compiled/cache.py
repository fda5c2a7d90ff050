"""Where machine code is kept for the next start: a folder for each version of the text it is made of."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba

_DAYS_KEPT = 30
_IMPORTS = re.compile(r"^from (\S+) import (\([^)]*\)|.*)$", re.MULTILINE)


def version_of(sources: Iterable[Path]) -> str:
    """Returns a name for machine code that is made of these files and this package's by this version of
    numba. By their paths, too, since numba takes no code of the same files elsewhere."""
    files = sorted({*sources, *Path(__file__).parent.glob("*.py")})
    text = b"".join(os.fsencode(path) + path.read_bytes() for path in files)
    return hashlib.sha256(text + numba.__version__.encode()).hexdigest()[:16]


def sources_of(file: Path, package: str) -> set[Path]:
    """Returns ``file`` and what it imports of the package, however far: of modules that are loaded."""
    found, waiting = set(), {file}
    while waiting:
        found.add(path := waiting.pop())
        for source, names in _IMPORTS.findall(path.read_text(encoding="utf-8")):
            for name in (source, *(f"{source}.{each}" for each in re.findall(r"\w+", names))):
                if name in sys.modules and name.partition(".")[0] == package:
                    waiting |= {Path(str(sys.modules[name].__file__))} - found
    return found


def folder_of(version: str) -> Path:
    """Returns where machine code of a version is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "slipstream" / "kernels" / version


@contextmanager
def kept(version: str, body: Callable[..., Any], *kinds: Any) -> Iterator[bool]:
    """Within it, machine code goes to a folder of that name, after the text of all that it is made of:
    numba itself looks at the one file that a function is in. Waits for a process that compiles ``body``
    for arguments of these types and for this CPU. False: there is no place for it."""
    target = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    what = hashlib.sha256(repr((body.__module__, body.__qualname__, kinds, target)).encode())
    before, lock = numba.config.CACHE_DIR, None
    with suppress(OSError, RuntimeError):
        folder = folder_of(version)
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # somebody uses it
        if is_new:
            _remove_unused(folder.parent)
        lock = (folder / f"{what.hexdigest()[:16]}.lock").open("w")
        numba.config.CACHE_DIR = str(folder)
    try:
        with suppress(OSError):  # a file system that locks nothing
            if lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock is not None
    finally:
        numba.config.CACHE_DIR = before
        if lock:
            lock.close()


def _remove_unused(folder: Path) -> None:
    """Removes what no process has taken code from for a month: a version of before. One that still runs
    makes its folder again when it compiles another."""
    oldest = time.time() - _DAYS_KEPT * 24 * 3600
    for version in folder.iterdir():
        with suppress(OSError):
            if version.stat().st_mtime < oldest:
                shutil.rmtree(version, ignore_errors=True)
