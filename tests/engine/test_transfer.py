from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.transfer import Readback, pack, read_now, unpack, upload

CPU = torch.device("cpu")
MIXED = (
    torch.tensor([[1.5, -2.0, 3.25]]),
    torch.tensor([2**40, -1]),
    torch.tensor([True]),
    torch.empty(0, 4),
    torch.tensor(7, dtype=torch.int64),
    torch.arange(12.0, dtype=torch.float64).view(3, 4).t(),
)


def test_tensors_of_all_types_travel_in_one_piece() -> None:
    packed = pack(MIXED)
    assert packed.dtype == torch.uint8
    assert packed.shape == (sum(each.numel() * each.element_size() for each in MIXED),)
    there = unpack(packed.clone(), MIXED)
    for got, sent in zip(there, MIXED, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_what_was_added_is_there_once_it_was_fetched() -> None:
    readback = Readback()
    first = readback.add(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="not fetched"):
        first.tolist()
    readback.fetch()
    second = readback.add(torch.tensor([0.5]))
    readback.fetch()
    assert (first.tolist(), second.tolist()) == ([1, 2], [0.5])
    readback.fetch()  # nothing is left to fetch


def test_a_reading_ends_with_what_it_began() -> None:
    assert read_now(lambda readback: readback.add(torch.tensor([[3]])).tolist) == [[3]]


@pytest.mark.parametrize("values", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])])
def test_numbers_of_any_kind_are_uploaded(values: object) -> None:
    assert upload(values, CPU).tolist() == [1, 2]
    assert upload(values, CPU, torch.float64).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_travel_to_a_gpu_and_back() -> None:
    sent = [upload(each, torch.device("cuda")) for each in MIXED]
    readback = Readback()
    arrivals = [readback.add(each) for each in sent]
    readback.fetch()
    assert [each.tolist() for each in arrivals] == [each.tolist() for each in MIXED]
