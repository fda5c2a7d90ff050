"""Linear layers for CPU bf16: weights packed once, row counts held fixed where bits would change.

torch's ``F.linear`` re-packs a bf16 weight at every call; oneDNN's prepacked form reads it once and
gives the same bits (measured here: 1.3-1.5x as fast at 1-16 rows). For some shapes oneDNN picks
another kernel, with other bits, from a certain number of rows on. Which, depends on machine and shape:
with AMX from 33 rows on; with AVX-512 alone from 2-13 rows on where a row is longer than 1024. So it
is measured at load, and in exact mode inputs go through in pieces that keep a row's bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_PROBED_ROWS = (2, 3, 4, 5, 6, 8, 12, 13, 16, 17, 24, 31, 32, 33, 48, 64, 128, 256, 512, 1024)
# Slices this long are worth having; shapes that are safe for fewer rows only get padded tiles.
_SHORTEST_SLICE = 16
# Rows of a padded tile: as cheap as a single row where weights bound the time, and exact by
# construction, since every call has the same shape.
_TILE_ROWS = 4
_LARGE_WEIGHT = 1 << 25
_LARGE_WEIGHT_ROWS = 64


class PackedLinear(nn.Module):
    """``nn.Linear`` over a oneDNN-prepacked bf16 weight.

    ``slice_rows``: never more rows in a call than this. ``tile_rows``: always exactly so many, the last
    tile padded. Both None: as they come.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.slice_rows: int | None = None
        self.tile_rows: int | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [..., in_features]
        rows = inputs.numel() // self.in_features
        if self.tile_rows is not None:
            return self._in_tiles(inputs, rows, self.tile_rows)
        if self.slice_rows is None or rows <= self.slice_rows:
            return self._apply_packed(inputs)
        parts = inputs.reshape(rows, self.in_features).split(self.slice_rows)
        result = torch.cat([self._apply_packed(part) for part in parts])
        return result.view(*inputs.shape[:-1], self.out_features)

    def _in_tiles(self, inputs: torch.Tensor, rows: int, tile: int) -> torch.Tensor:
        flat = inputs.reshape(rows, self.in_features)
        missing = -rows % tile
        if missing:
            flat = F.pad(flat, (0, 0, 0, missing))
        parts = [self._apply_packed(part) for part in flat.split(tile)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
        return result[:rows].view(*inputs.shape[:-1], self.out_features)

    def _apply_packed(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self.bias, "none", [], ""
        )
        return result

    def make_exact(self, safe_rows: int) -> None:
        """Keep every row's bits, given the row count up to which they hold by themselves."""
        if safe_rows < _SHORTEST_SLICE:
            self.tile_rows = _TILE_ROWS
        else:
            self.slice_rows = safe_rows


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def safe_rows(in_features: int, out_features: int, most: int) -> int:
    """The largest probed row count, ``most`` at most, up to which every row has the bits it has alone.

    Rounding to bf16 hides most differences in the order of summation. So the probe's products cancel
    in pairs: what is left of a sum is its rounding errors, which no other order repeats. All rows of
    the probe are one row, whose bits have to come out at every place: its outputs are sums enough.
    """
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
    layer = PackedLinear(linear)

    alone = layer(row)
    safe = 1
    most = min(most, _PROBED_ROWS[-1])
    for rows in sorted({most, *(count for count in _PROBED_ROWS if count < most)}):
        if not torch.equal(layer(row.repeat(rows, 1)), alone.expand(rows, -1)):
            break
        safe = rows
    return safe


def _probe_within_reason(in_features: int, out_features: int, most: int) -> int:
    """Vocabulary-sized heads see few rows; probing them for a whole chunk would take half a minute."""
    large = in_features * out_features > _LARGE_WEIGHT
    return safe_rows(in_features, out_features, min(most, _LARGE_WEIGHT_ROWS) if large else most)


def pack_linears(model: nn.Module, most_rows: int, exact: bool) -> int:
    """Replace every plain ``nn.Linear`` of the model in place; returns how many.

    The unpacked weight is dropped with its module; a tied head keeps the embedding and packs a copy.
    """
    limits: dict[tuple[int, int], int] = {}
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            packed = PackedLinear(child)
            if exact:
                shape = (child.in_features, child.out_features)
                if shape not in limits:
                    limits[shape] = _probe_within_reason(*shape, most_rows)
                packed.make_exact(limits[shape])
            setattr(parent, name, packed)
            replaced += 1
    return replaced
