"""Memory for weights: tensors of their own, whatever is asked for and whoever lets go."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from engine.kernels import weight_memory
from engine.kernels.weight_memory import as_weights, empty_weights


@pytest.fixture(autouse=True)
def own_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory._Latest, "region", None)
    monkeypatch.setattr(weight_memory, "_PAGE", mmap.PAGESIZE)
    monkeypatch.setattr(weight_memory, "_REGION", mmap.PAGESIZE)


def test_tensors_do_not_share_a_byte() -> None:
    shapes = [(3, 5), (1000,), (7, 100, 3), (64,), (4096,), (1,), (5000,)] * 3
    made = [empty_weights(shape, torch.uint8) for shape in shapes]
    for number, each in enumerate(made):
        each.fill_(number)
    assert [each.unique().tolist() for each in made] == [[number] for number in range(len(made))]
    assert [tuple(each.shape) for each in made] == shapes
    assert all(each.data_ptr() % 64 == 0 for each in made)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_a_copy_is_contiguous_and_equal(dtype: torch.dtype) -> None:
    values = torch.arange(24).to(dtype).view(4, 6).T
    copied = as_weights(values)
    assert copied.is_contiguous()
    assert torch.equal(copied, values)
    assert copied.dtype == dtype


def test_a_region_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[mmap.mmap]] = []

    class Held(mmap.mmap):
        def __init__(self, *_: int) -> None:
            held.append(weakref.ref(self))

    monkeypatch.setattr(weight_memory.mmap, "mmap", Held)
    half = (mmap.PAGESIZE // 2,)
    first, second = (empty_weights(half, torch.uint8).fill_(7) for _ in range(2))
    other = empty_weights(half, torch.uint8)  # in the next region
    assert len(held) == 2
    del first
    gc.collect()
    assert held[0]() is not None
    assert second.unique().tolist() == [7]
    del second
    gc.collect()
    assert held[0]() is None
    assert held[1]() is not None
    assert other.shape == half
