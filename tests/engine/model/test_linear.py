"""Packed linears: the same products as ``F.linear``, and in exact mode the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.model import linear as linear_module
from engine.model.linear import TILES, PackedLinear, RowSpan, can_pack, pack_linears, stable_rows

torch.set_num_threads(1)

CPU = torch.device("cpu")
needs_bf16 = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="this CPU has no bf16 instructions"
)
# Beyond 1024 inputs oneDNN changes its kernel with the row count on CPUs without AMX; odd sizes have
# kernels of their own for what is left over.
SHAPES = [(64, 97), (256, 768), (768, 256), (40, 7), (1100, 33), (1536, 64), (2048, 96)]
MOST_ROWS = 600


def make_linear(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """Bf16, with weights that repeat in pairs (see ``cancelling_rows``)."""
    generator = torch.Generator().manual_seed(in_features)
    linear = nn.Linear(in_features, out_features, bias=bias).to(torch.bfloat16)
    half = in_features // 2
    weight = torch.randn(out_features, in_features, generator=generator).to(torch.bfloat16)
    weight[:, half : 2 * half] = weight[:, :half].flip(1)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        values = torch.randn(out_features, generator=generator).to(torch.bfloat16)
        linear.bias = nn.Parameter(values, requires_grad=False)
    return linear


def cancelling_rows(count: int, in_features: int) -> torch.Tensor:
    """Rows whose products with ``make_linear``'s weights cancel in pairs: what is left are rounding
    errors, so that a sum in any other order shows even after rounding to bf16."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, in_features, generator=generator).to(torch.bfloat16)
    half = in_features // 2
    rows[:, half : 2 * half] = -rows[:, :half].flip(1)
    return rows


@needs_bf16
@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_packed_products_equal_f_linear(in_features: int, out_features: int, bias: bool) -> None:
    linear = make_linear(in_features, out_features, bias)
    inputs = torch.randn(2, 9, in_features).to(torch.bfloat16)
    expected = F.linear(
        inputs.double(), linear.weight.double(), linear.bias.double() if bias else None
    )
    own = F.linear(inputs, linear.weight, linear.bias)
    for exact in (False, True):
        packed = PackedLinear(linear, stable_rows(in_features, out_features, 64) if exact else None)
        output = packed(inputs)
        assert output.shape == (2, 9, out_features)
        assert output.dtype == torch.bfloat16
        error, own_error = ((each.double() - expected).abs().max() for each in (output, own))
        # Rounding to bf16 is all there is: half a unit in the last of 8 bits.
        assert error <= max(1.01 * own_error, expected.abs().max() * 2.0**-8)


@needs_bf16
@torch.inference_mode()
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_an_exact_layer_gives_a_row_the_same_bits_alone_and_among_600(
    in_features: int, out_features: int
) -> None:
    span = stable_rows(in_features, out_features, MOST_ROWS)
    layer = PackedLinear(make_linear(in_features, out_features), span)
    rows = cancelling_rows(MOST_ROWS, in_features)
    assert rows.unique(dim=0).shape[0] == MOST_ROWS
    alone = torch.cat([layer(rows[index : index + 1]) for index in range(MOST_ROWS)])
    for count in (*range(2, 36), 47, 63, 64, 65, 100, 129, 255, 257, 400, 512, 513, MOST_ROWS):
        for first in (0, (MOST_ROWS - count) // 2):
            among = layer(rows[first : first + count])
            assert torch.equal(among, alone[first : first + count]), (count, first)


def fussy_kernel(*limits: int) -> Callable[[PackedLinear, torch.Tensor], torch.Tensor]:
    """A kernel that sums in another order from each of these row counts on, as oneDNN's do."""

    def apply(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        assert rows.shape[0] > 0
        shift = float(sum(rows.shape[0] >= limit for limit in limits))
        result = rows.sum(-1, keepdim=True).expand(-1, self.out_features) + shift
        return result.to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)

    return apply


@needs_bf16
@torch.inference_mode()
@pytest.mark.parametrize(
    ("limits", "most", "span"),
    [
        ((2,), MOST_ROWS, (2, MOST_ROWS)),
        ((2, 33), MOST_ROWS, (2, 32)),
        ((3,), MOST_ROWS, (4, MOST_ROWS)),
        ((2, 3, 5), MOST_ROWS, TILES),
        ((13,), MOST_ROWS, TILES),
        ((33,), MOST_ROWS, (1, 32)),
        ((10_000,), MOST_ROWS, (1, MOST_ROWS)),
        ((10_000,), 8, (1, 8)),
        ((2,), 1, (1, 1)),
    ],
)
def test_the_probe_finds_which_row_counts_share_bits_and_the_layer_stays_among_them(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...], most: int, span: tuple[int, int]
) -> None:
    monkeypatch.setattr(PackedLinear, "_apply_packed", fussy_kernel(*limits))
    assert stable_rows(64, 8, most) == span
    layer = PackedLinear(make_linear(64, 8), RowSpan(*span))
    rows = cancelling_rows(70, 64)
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (1, 2, 3, 4, 5, 33, 65, 70):
        assert torch.equal(layer(rows[:count]), alone[:count])


@needs_bf16
@torch.inference_mode()
def test_tiles_have_one_shape_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def apply(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.numel() // self.in_features)
        return inputs[..., :1].expand(*inputs.shape[:-1], self.out_features)

    monkeypatch.setattr(PackedLinear, "_apply_packed", apply)
    layer = PackedLinear(make_linear(64, 8), TILES)
    for count in (1, 4, 7, 600):
        inputs = torch.arange(count, dtype=torch.bfloat16)[None, :, None].expand(1, count, 64)
        output = layer(inputs)
        assert output.shape == (1, count, 8)
        assert torch.equal(output[0, :, 0], inputs[0, :, 0])
    assert set(seen) == {4}


class Toy(nn.Module):
    """Two linears of one shape, a tied head, and something that only looks like a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.layers = nn.ModuleList([make_linear(64, 64), make_linear(64, 64, True)])
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.special = nn.Bilinear(64, 64, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = F.silu(layer(hidden)) * 0.1
        result: torch.Tensor = self.head(hidden)
        return result


@needs_bf16
@torch.inference_mode()
def test_packing_replaces_every_linear_and_leaves_the_tied_embedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy().to(torch.bfloat16)
    ids = torch.arange(10)
    expected = toy(ids).float()
    embedding = toy.embedding.weight.clone()
    probed: list[tuple[int, int]] = []

    def probe(in_features: int, out_features: int, most: int) -> RowSpan:
        probed.append((in_features, out_features))
        return stable_rows(in_features, out_features, most)

    monkeypatch.setattr(linear_module, "stable_rows", probe)
    assert pack_linears(toy, 64, exact=True) == 3
    assert sorted(probed) == [(64, 50), (64, 64)]  # once per shape
    kinds = [type(module) for module in toy.modules()]
    assert kinds.count(PackedLinear) == 3
    assert nn.Linear not in kinds
    assert nn.Bilinear in kinds
    assert torch.equal(toy.embedding.weight, embedding)
    torch.testing.assert_close(toy(ids).float(), expected, rtol=0.02, atol=0.02)


@needs_bf16
def test_a_vocabulary_sized_head_is_probed_for_few_rows_and_kept_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def probe(in_features: int, out_features: int, most: int) -> RowSpan:  # noqa: ARG001
        asked.append(most)
        return RowSpan(1, most)

    monkeypatch.setattr(linear_module, "stable_rows", probe)
    monkeypatch.setattr(linear_module, "_LARGE_WEIGHT", 64 * 50)
    toy = nn.ModuleDict({"small": nn.Linear(64, 50), "large": nn.Linear(64, 51)})
    toy.to(torch.bfloat16)
    pack_linears(toy, 1024, exact=True)
    assert asked == [1024, 64]
    assert [layer.span for layer in toy.values()] == [(1, 1024), (1, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bf16_on_a_cpu_is_packed(dtype: torch.dtype) -> None:
    assert not can_pack(CPU, dtype)
    assert not can_pack(torch.device("meta"), torch.bfloat16)
