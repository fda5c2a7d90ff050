"""Norms in one pass: what they replace is seen in what it does, and rows keep their bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.kernels.triton.row_ops import row_norm
from engine.model import norms
from engine.model.norms import FusedNorm, fuse_norms, row_norm_for
from worlds.tiny_models import tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def with_random_weights(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model(name, dtype))
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data += noise.to(dtype)
    return model


@pytest.mark.parametrize(
    ("dtype", "is_triton"),
    [*((dtype, False) for dtype in DTYPES), (torch.float32, True), (torch.float16, True)],
)
@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("gemma2", 1.0)])
def test_norms_of_a_model_are_found_and_write_the_same(
    name: str,
    offset: float,
    dtype: torch.dtype,
    is_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Triton's program, too, whose interpreter does not round bfloat16 to the nearest."""
    if is_triton:
        monkeypatch.setattr(norms, "row_norm_for", lambda *_: row_norm)
    model = with_random_weights(name, dtype)
    ids = torch.arange(2, 30)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        named = [each for each in model.modules() if type(each).__name__.endswith("RMSNorm")]
        assert fuse_norms(model) == len(named) > 0
        got = model(input_ids=ids, use_cache=False).logits.float()
    fused = [each for each in model.modules() if isinstance(each, FusedNorm)]
    assert {each.offset for each in fused} == {offset}
    if dtype != torch.float32:
        assert {each.is_rounded for each in fused} == {name == "llama"}
    assert (got - expected).abs().mean() < norms._TOLERANCE[dtype] * expected.std()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_any_others(dtype: torch.dtype) -> None:
    compute = row_norm_for(torch.device("cpu"), 1040)
    assert compute is not None
    norm = FusedNorm(nn.Parameter(torch.randn(1040).to(dtype)), 1e-6, 0.0, True, compute)
    rows = torch.randn(1, 100, 1040).to(dtype)
    every = norm(rows)
    for row in (0, 1, 57, 99):
        assert torch.equal(norm(rows[:, row : row + 1])[0, 0], every[0, row])
    spread = rows.transpose(0, 1).expand(100, 3, 1040)
    assert torch.equal(norm(spread)[:, 2], every[0])


class Other(nn.Module):
    """A weight and an epsilon, but no such norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


class Pairs(Other):
    def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rows * gate


def test_what_does_something_else_stays_as_it_is() -> None:
    kept = [Other(), Pairs(), nn.LayerNorm(32), nn.LayerNorm(32, bias=False), nn.RMSNorm(24, 1e-6)]
    model = nn.Sequential(*kept)
    assert fuse_norms(model) == 0
    assert list(model) == kept
    model.append(nn.RMSNorm(32, 1e-6))
    assert fuse_norms(model) == 1
