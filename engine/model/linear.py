"""Linear layers for CPU bf16: weights packed once, row counts held fixed where bits would change.

torch's ``F.linear`` re-packs a bf16 weight at every call; oneDNN's prepacked form reads it once and
gives the same bits (measured here: 1.3-1.5x as fast at 1-16 rows). For some shapes oneDNN picks
another kernel, with other bits, from a certain number of rows on. Which, depends on machine and shape:
with AMX from 33 rows on; with AVX-512 alone from 2-13 rows on where a row is longer than 1024, and
often for a single row only. So the span of row counts that share their bits is measured at load, and
in exact mode inputs go through in pieces within that span.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

_PROBED_ROWS = (2, 3, 4, 5, 6, 8, 12, 13, 16, 17, 24, 31, 32, 33, 48, 64, 128, 256, 512, 1024)
# Where a span of equal bits may begin: fewer rows are padded to so many, about as cheap as a single
# row where weights bound the time.
_LEAST_ROWS = (1, 2, 4)
# Spans this long are worth having.
_SHORTEST_SLICE = 16
_LARGE_WEIGHT = 1 << 25
_LARGE_WEIGHT_ROWS = 64


class RowSpan(NamedTuple):
    """Row counts of a call, both ends included, that give every row the same bits."""

    least: int
    most: int


TILES = RowSpan(4, 4)
"""Always exactly so many rows: exact by construction, since every call has the same shape."""


class PackedLinear(nn.Module):
    """``nn.Linear`` over a oneDNN-prepacked bf16 weight.

    ``span``: inputs are cut into calls of so many rows, and padded where there are fewer. None: as
    they come.
    """

    def __init__(self, linear: nn.Linear, span: RowSpan | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.span = span

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [..., in_features]
        rows = inputs.numel() // self.in_features
        if self.span is None or self.span.least <= rows <= self.span.most:
            return self._apply_packed(inputs)
        flat = inputs.reshape(rows, self.in_features)
        parts = [self._apply_padded(part, self.span.least) for part in flat.split(self.span.most)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
        return result.view(*inputs.shape[:-1], self.out_features)

    def _apply_padded(self, inputs: torch.Tensor, least: int) -> torch.Tensor:
        rows = inputs.shape[0]
        if rows >= least:
            return self._apply_packed(inputs)
        return self._apply_packed(F.pad(inputs, (0, 0, 0, least - rows)))[:rows]

    def _apply_packed(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self.bias, "none", [], ""
        )
        return result


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def stable_rows(in_features: int, out_features: int, most: int) -> RowSpan:
    """The first long enough span of probed row counts, up to ``most``, that share their bits; tiles
    where there is none.

    Rounding to bf16 hides most differences in the order of summation. So the probe's products cancel
    in pairs: what is left of a sum is its rounding errors, which no other order repeats. All rows of
    the probe are one row, whose bits have to come out at every place: its outputs are sums enough.
    """
    layer, row = _probe(in_features, out_features)
    most = max(1, min(most, _PROBED_ROWS[-1]))
    counts = sorted({1, most, *(count for count in _PROBED_ROWS if count < most)})
    outputs: dict[int, torch.Tensor] = {}
    for least in _LEAST_ROWS:
        last = 0
        for count in counts:
            if count < least:
                continue
            if count not in outputs:
                outputs[count] = layer(row.expand(count, -1).contiguous())
            if not torch.equal(outputs[count], outputs[least][:1].expand(count, -1)):
                break
            last = count
        if last >= min(most, _SHORTEST_SLICE):
            return RowSpan(least, last)
    return TILES


def _probe(in_features: int, out_features: int) -> tuple[PackedLinear, torch.Tensor]:
    """A layer, and a row ``[1, in_features]`` whose products with its weights cancel in pairs."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(torch.bfloat16)
    row = torch.randn(1, in_features, generator=generator).to(torch.bfloat16)
    order = torch.randperm(in_features, generator=generator)
    half = in_features // 2
    first, second = order[:half], order[half : 2 * half]
    weight[:, second] = weight[:, first]
    row[:, second] = -row[:, first]
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(linear), row


def _probe_within_reason(in_features: int, out_features: int, most: int) -> RowSpan:
    """Vocabulary-sized heads see few rows; probing them for a whole chunk would take half a minute."""
    large = in_features * out_features > _LARGE_WEIGHT
    return stable_rows(in_features, out_features, min(most, _LARGE_WEIGHT_ROWS) if large else most)


def pack_linears(model: nn.Module, most_rows: int, exact: bool) -> int:
    """Replace every plain ``nn.Linear`` of the model in place; returns how many.

    The unpacked weight is dropped with its module; a tied head keeps the embedding and packs a copy.
    """
    spans: dict[tuple[int, int], RowSpan] = {}
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            shape = (child.in_features, child.out_features)
            if exact and shape not in spans:
                spans[shape] = _probe_within_reason(*shape, most_rows)
            setattr(parent, name, PackedLinear(child, spans.get(shape)))
            replaced += 1
    return replaced
