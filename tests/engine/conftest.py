from __future__ import annotations

import pytest
import torch

from worlds.engine_harness import TinyTarget


@pytest.fixture(scope="session")
def tiny_target() -> TinyTarget:
    torch.set_num_threads(1)
    return TinyTarget()
