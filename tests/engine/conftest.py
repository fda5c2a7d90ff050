from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from worlds.engine_harness import TinyTarget
from worlds.interpreted import patching_once

if TYPE_CHECKING:
    from worlds.every_drafter import EveryDrafterTarget

torch.set_num_threads(1)  # of tests that say no number


@pytest.fixture(scope="session")
def tiny_target() -> TinyTarget:
    return TinyTarget()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> EveryDrafterTarget:
    """A target with every drafter there is, where a module has no other target of its own."""
    from worlds.every_drafter import EveryDrafterTarget  # for few tests: it takes a while

    return EveryDrafterTarget(tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="module")
def patched_once() -> Iterator[None]:
    with patching_once():
        yield
