"""Promise 1 in the bits that checkpoints bring: every format, loaded and built as it is served, writes
the bits that it writes alone without drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engine.kernels.integers import can_multiply
from worlds.packed_models import FLOATS, FORMATS
from worlds.packed_target import PackedTarget, check_no_bit_changes
from worlds.tiny_models import CPU

pytestmark = [
    pytest.mark.slow(by="path"),
    pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2"),
]


@cache
def target_of(path: Path, keeps_inputs: bool) -> PackedTarget:
    return PackedTarget(path, keeps_inputs, CPU)


@pytest.fixture(scope="module", params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write: Callable[[Path], Path] = FORMATS[request.param]
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[False, True], ids=["rounded", "kept"])
def target(request: pytest.FixtureRequest, path: Path) -> PackedTarget:
    return target_of(path, request.param)


def test_weights_keep_their_bits(target: PackedTarget, request: pytest.FixtureRequest) -> None:
    is_packed = request.node.callspec.params["path"] not in FLOATS
    assert (target.info.quantization is not None) == is_packed


@pytest.mark.parametrize("situation", ["mixed_batch", "prefix_hit", "preempted"])
def test_drafting_changes_no_bit(target: PackedTarget, situation: str) -> None:
    check_no_bit_changes(target, situation)
