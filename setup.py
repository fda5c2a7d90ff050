"""Compiles what a step runs in Python, where an installation asks for it and a C compiler is there:
``COMPILE_SLIPSTREAM=1 pip install .``"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

COMPILED = [
    "drafters/batch_times.py",
    "drafters/containment.py",
    "drafters/estimator.py",
    "drafters/ledger.py",
    "drafters/tree.py",
    "engine/accounts.py",
    "engine/batch.py",
    "engine/core.py",
    "engine/request/outcome.py",
    "engine/sampling/logprobs.py",
    "engine/sampling/sampler.py",
    "engine/sampling/state.py",
    "engine/schedule/ahead.py",
    "engine/schedule/choices.py",
    "engine/schedule/request.py",
    "engine/schedule/scheduler.py",
    "engine/speculation/acceptance.py",
    "engine/speculation/baseline.py",
    "engine/speculation/constrained.py",
    "engine/speculation/drafting.py",
    "engine/speculation/gamma/goodput.py",
    "engine/speculation/granting.py",
    "engine/speculation/ledgers.py",
    "engine/speculation/manager.py",
    "engine/speculation/overlay.py",
    "engine/speculation/parts.py",
    "engine/speculation/proposing.py",
    "engine/transfer.py",
    "engine/verification/follow.py",
    "engine/verification/match.py",
    "engine/verification/verify.py",
    "kvpool/block_pool.py",
    "kvpool/prefix_cache.py",
]
"""Not what others inherit from, or register by its text, or send to other processes; nor what tells
kernels addresses: compiled code lets go of a value after its last use, and a kernel would read something
else."""
_MYPY = """
[mypy]
follow_imports = silent
ignore_missing_imports = True
disable_error_code = var-annotated
[mypy-llvmlite.*,numba.*,torch.*,transformers.*]
follow_imports = skip
"""
"""Types were checked when they were written, with packages that may be missing here."""
COMPILER = "mypy==2.4.1"
_IS_ASKED = os.environ.get("COMPILE_SLIPSTREAM", "0") not in ("", "0")


def extensions() -> list[Any]:
    """Returns what is compiled; nothing while pip asks what that needs."""
    if not _IS_ASKED or {"dist_info", "egg_info"}.intersection(sys.argv):
        return []
    if "editable_wheel" in sys.argv:
        raise SystemExit("COMPILE_SLIPSTREAM: what pip installs with -e runs as it is written")
    from mypyc.build import mypycify

    config = Path("build/mypy.ini")
    config.parent.mkdir(exist_ok=True)
    config.write_text(_MYPY, encoding="utf-8")
    found: list[Any] = mypycify(["--config-file", str(config), *COMPILED], debug_level="0")
    return found


if __name__ == "__main__":
    setup(ext_modules=extensions(), setup_requires=[COMPILER] if _IS_ASKED else [])
