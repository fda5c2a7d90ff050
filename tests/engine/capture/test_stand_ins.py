"""Kernels that stand for torch's operations make what these make, of any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.batch import ForwardOutput
from engine.capture.recorder import KernelCall, Recorder
from engine.capture.recording import Recording
from engine.capture.sample import Sample, Shape
from engine.kernels import KINDS
from engine.weights.layer import scaled

WIDTH = 24
FACTORS, PICKED = torch.linspace(-2.0, 2.0, WIDTH), torch.tensor([5, 0, 5, 23])
NUMBERS = torch.tensor([[0, 3], [2, 1], [3, 3], [1, 0]]).repeat(3, 1)
"""Two columns of each row."""

Operation = Callable[[Tensor], Tensor]
"""Takes rows ``[num_rows, WIDTH]``."""


def in_place(rows: Tensor) -> Tensor:
    own = rows * 1.0
    own.div_(rows[:, :1]).mul_(FACTORS.to(rows.dtype)).add_(rows)
    own[:, :8].copy_(rows[:, 8:24:2])
    return own


def masked(rows: Tensor) -> Tensor:
    """As routers choose among groups of experts."""
    mask = torch.zeros_like(rows[:, :4])
    mask.scatter_(1, NUMBERS[: len(rows)], 1)
    wide = mask.unsqueeze(-1).expand(-1, 4, 6).reshape(-1, WIDTH)
    others = ~wide.bool()
    return torch.cat([rows.masked_fill(others, -torch.inf), rows.masked_fill(others, 0.22)])


OPERATIONS: dict[str, Operation] = {
    "sum": lambda rows: rows + rows[:, -1:] + FACTORS.to(rows.dtype),
    "sum with a number": lambda rows: (rows + 0.22) - 0.57,
    "product": lambda rows: rows * FACTORS.to(rows.dtype) * 0.22 / 7,
    "quotient": lambda rows: rows / rows[:, 3:4],
    "wider": lambda rows: (rows * FACTORS).to(rows.dtype),
    "negative": lambda rows: -rows.pow(2),
    "clamped": lambda rows: rows.clamp(-1.0, 0.5).clamp(min=-0.3).clamp(max=0.1),
    "scaled": lambda rows: scaled(rows, 33.9411),
    "rectified": lambda rows: torch.relu(rows[:, 1:]).square(),
    "heads": lambda rows: rows.view(1, -1, 4, 6).transpose(1, 2) * rows[None, None, :, :6],
    "every other": lambda rows: rows[:, ::2] * rows[:, 1::2],
    "other way round": lambda rows: rows.view(-1, 4, 6).transpose(1, 2).reshape(-1, WIDTH),
    "copied": lambda rows: (
        rows.view(-1, 4, 6).transpose(1, 2).contiguous().flatten(1)[:, 1:].clone()
    ),
    "joined": lambda rows: torch.cat([rows[:, 5:], rows[:, :0], -rows[:, :5]], -1),
    "below each other": lambda rows: torch.cat([rows, rows[:1].expand(3, -1), rows * 2.0]),
    "typed": lambda rows: rows.float().type_as(rows).half().float(),
    "picked": lambda rows: rows.index_select(1, PICKED),
    "gathered": lambda rows: rows.gather(1, NUMBERS[: len(rows)]),
    "padded": lambda rows: torch.nn.functional.pad(rows.view(-1, 4, 6), [0, 2]),
    "masked": masked,
    "in place": in_place,
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
@torch.inference_mode()
def test_results_have_torchs_bits(name: str, dtype: torch.dtype) -> None:
    memory = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)

    def forward(shape: Shape) -> ForwardOutput:
        return ForwardOutput(OPERATIONS[name](memory[: shape.num_rows]), ())

    def sample(shape: Shape) -> Sample:
        recorder = Recorder()
        with recorder.watch():
            output = forward(shape)
        assert {type(each) for each in recorder.calls} == {KernelCall}, recorder.calls
        return Sample(recorder, output)

    forward(Shape(2, 1))  # as forwards are run before one is recorded
    recording = Recording(sample)
    for num_rows in (12, 2, 5):
        memory.copy_(memory.roll(num_rows))
        found = recording.replay(Shape(num_rows, 1), cast(Any, None), 1)
        assert torch.equal(found.logits, forward(Shape(num_rows, 1)).logits)


@torch.inference_mode()
def test_what_shares_its_memory_is_not_copied() -> None:
    recorder = Recorder()
    with recorder.watch():
        rows = torch.zeros(4, WIDTH)
        for same in (rows.contiguous(), rows.reshape(-1), rows.to(torch.float32), rows.flatten()):
            assert same.data_ptr() == rows.data_ptr()
    assert not any(isinstance(each, KernelCall) for each in recorder.calls)
