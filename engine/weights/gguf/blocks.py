"""Weights as GGUF files have them: rows of blocks, each with its scales.

Blocks: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp. Q4_K and Q5_K subtract
minima that are products of two numbers, where ``GroupedWeight`` adds the product with one of them
negated, which is the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine.kernels.grouped_weight import GroupedWeight
from engine.weights.layer import StoredLinear, StoredWeight, fixed

IQ4_VALUES = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
"""Values of the codes of IQ4_NL and IQ4_XS, plus 128."""
MXFP4_VALUES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Values of the codes of MXFP4: twice the 4-bit numbers (a sign, two bits of exponent, one of
fraction), plus 12."""


class Packed(NamedTuple):
    """Numbers of ``bits`` bits in a block's bytes from ``start`` on: of each ``width`` bytes first the
    lowest bits, then the next."""

    start: int
    width: int
    bits: int = 4

    def unpacked(self, blocks: torch.Tensor, count: int) -> torch.Tensor:
        """``[rows, blocks, bytes]`` to ``[rows, blocks, count]`` uint8."""
        data = blocks[..., self.start : self.start + count * self.bits // 8]
        runs = data.reshape(*data.shape[:2], -1, 1, self.width)
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=data.device)
        return ((runs >> shifts[:, None]) & (1 << self.bits) - 1).flatten(2)


Inner = Callable[[torch.Tensor], dict[str, Any]]
"""Takes blocks of 256 and returns the scales within them, in the words of ``GroupedWeight``."""


class BlockType(NamedTuple):
    """A type of blocks. ``num_values``, ``num_bytes``: of a block. ``halves``: where in it its float16
    numbers begin, a scale and a minimum; none: the first byte is an exponent. ``low``: the lowest bits of
    codes, None: they are signed bytes behind the scale; ``high``: the others. ``zero``, ``table``: as in
    ``GroupedWeight``."""

    name: str
    num_values: int
    num_bytes: int
    halves: tuple[int, ...]
    low: Packed | None = None
    high: Packed | None = None
    zero: int = 0
    inner: Inner = lambda _: {}
    table: tuple[int, ...] = ()

    def row_bytes(self, in_features: int) -> int:
        return in_features // self.num_values * self.num_bytes

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return self.num_bytes * 8 / self.num_values

    def read(self, blocks: torch.Tensor) -> GroupedWeight:
        """Returns the weights of blocks ``[rows, blocks, num_bytes]``."""
        if self.low is None:
            codes, bits = blocks[..., 2:] ^ 128, 8  # a flipped sign bit is 128 added
        else:
            codes, bits = self.low.unpacked(blocks, self.num_values), self.low.bits
        if self.high is not None:
            codes = codes | (self.high.unpacked(blocks, self.num_values) << bits)
            bits += self.high.bits
        if not self.halves:
            return from_mxfp4(codes, blocks[..., 0])
        halves = (_half(blocks, start) for start in self.halves)
        numbers: dict[str, Any] = dict(zip(("scales", "minima"), halves, strict=False))
        return GroupedWeight(
            codes.flatten(1),
            bits,
            self.zero,
            self.num_values,
            table=self.table,
            **numbers | self.inner(blocks),
        )


class _Rows(StoredWeight):
    """``weight``: ``[out_features, bytes of a row]`` uint8."""

    method = "gguf"
    weight: torch.nn.Parameter

    def _hold(self, kind: str) -> None:
        self._type = BLOCK_TYPES[kind]
        self.scheme, self.bits = self._type.name, self._type.bits
        num_bytes = self._type.row_bytes(self.in_features)
        self.weight = fixed(torch.empty(self.out_features, num_bytes, dtype=torch.uint8))

    def part(self, first: int, end: int) -> GroupedWeight:
        return self._type.read(self._blocks(self.weight[first:end]))

    def block_scales(self) -> torch.Tensor:
        """Returns numbers that are finite where weights are."""
        return block_scales(self.weight.detach(), self._type)

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.detach().view(len(rows), -1, self._type.num_bytes)


class GgufWeight(_Rows, StoredLinear):
    """A linear layer. ``kind``: its type, one of ``BLOCK_TYPES``."""

    def __init__(
        self, kind: str, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, out_features, has_bias, dtype)
        self._hold(kind)


class GgufEmbedding(_Rows):
    """An embedding, whose rows are its vectors. ``kind``: as for ``GgufWeight``; ``scale``: what the
    model multiplies with them (``engine.weights.layer.embed_scale``)."""

    def __init__(
        self, kind: str, num_embeddings: int, embedding_dim: int, scale: float = 1.0
    ) -> None:
        super().__init__(embedding_dim, num_embeddings)
        self.embed_scale = scale
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._hold(kind)


def block_scales(rows: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Returns numbers of all blocks of ``rows`` ``[rows, bytes]`` that are finite where weights are:
    their float16 numbers, or the largest weights that exponents allow."""
    blocks = rows.view(len(rows), -1, kind.num_bytes)
    if not kind.halves:
        return largest_mxfp4(blocks[..., 0].flatten())
    return torch.cat([_half(blocks, start).flatten() for start in kind.halves])


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Returns a float16 number of each block: ``[rows, blocks]``, a view."""
    return blocks.view(torch.float16)[..., start // 2]


def _scales_and_minima(blocks: torch.Tensor) -> dict[str, Any]:
    """Q4_K and Q5_K have 8 scales and 8 minima of 6 bits in 12 bytes: the first four of each in the low
    bits of 4 bytes, the others' low halves in the last 4, with 2 bits above the former."""
    first, second, halves = blocks[..., 4:16].split(4, 2)
    scales = torch.cat([first & 63, (halves & 15) | ((first >> 6) << 4)], 2)
    minima = torch.cat([second & 63, (halves >> 4) | ((second >> 6) << 4)], 2)
    return {
        "minima": -_half(blocks, 2),
        "inner_span": 32,
        "inner_scales": scales.flatten(1),
        "inner_minima": minima.flatten(1),
    }


def _byte_scales(blocks: torch.Tensor) -> dict[str, Any]:
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return {"inner_span": 16, "inner_scales": scales.flatten(1)}


def _split_scales(blocks: torch.Tensor) -> dict[str, Any]:
    """IQ4_XS has 8 scales of 6 bits, plus 32: two bits of each in two bytes, four in the next four."""
    codes = Packed(4, 1).unpacked(blocks, 8) | (Packed(2, 1, 2).unpacked(blocks, 8) << 4)
    return {"inner_span": 32, "inner_scales": (codes.to(torch.int8) - 32).flatten(1)}


def from_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> GroupedWeight:
    """Returns weights of ``codes`` ``[rows, blocks, 32]`` and the ``exponents`` ``[rows, blocks]`` uint8
    of blocks, plus 127. A block of zeros has a scale of 0."""
    is_zero = ((codes & 7) == 0).all(2)
    scales = _half_powers(exponents).masked_fill(is_zero, 0)
    return GroupedWeight(codes.flatten(1), 4, 12, 32, scales, table=MXFP4_VALUES)


def largest_mxfp4(exponents: torch.Tensor) -> torch.Tensor:
    """Returns the largest numbers of blocks with these ``exponents``, or infinity."""
    return 12 * _half_powers(exponents)


def _half_powers(exponents: torch.Tensor) -> torch.Tensor:
    """Returns half of two to each power, given plus 127. The smallest two floats have no exponent of
    their own."""
    wide = exponents.int()
    bits = torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1) << 23)
    return bits.view(torch.float32)


BLOCK_TYPES = {
    each.name: each
    for each in (
        BlockType("Q4_0", 32, 18, (0,), Packed(2, 16), zero=8),
        BlockType("Q4_1", 32, 20, (0, 2), Packed(4, 16)),
        BlockType("Q5_0", 32, 22, (0,), Packed(6, 16), Packed(2, 1, 1), zero=16),
        BlockType("Q5_1", 32, 24, (0, 2), Packed(8, 16), Packed(4, 1, 1)),
        BlockType("Q8_0", 32, 34, (0,), zero=128),
        BlockType("Q4_K", 256, 144, (0, 2), Packed(16, 32), inner=_scales_and_minima),
        BlockType(
            "Q5_K", 256, 176, (0, 2), Packed(48, 32), Packed(16, 32, 1), inner=_scales_and_minima
        ),
        BlockType(
            "Q6_K", 256, 210, (208,), Packed(0, 64), Packed(128, 32, 2), 32, inner=_byte_scales
        ),
        BlockType("IQ4_NL", 32, 18, (0,), Packed(2, 16), zero=128, table=IQ4_VALUES),
        BlockType("IQ4_XS", 256, 136, (0,), Packed(8, 16), None, 128, _split_scales, IQ4_VALUES),
        BlockType("MXFP4", 32, 17, (), Packed(1, 16)),
    )
}
"""The types that stay as they are, by ggml's names."""
