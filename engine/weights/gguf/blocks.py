"""Weights as GGUF files have them: rows of blocks, each with its scales.

Blocks: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp. Q4_K and Q5_K subtract
minima that are products of two numbers, where ``GroupedWeight`` adds the product with one of them
negated, which is the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.kernels.grouped_weight import GroupedWeight
from engine.weights.layer import StoredLinear, StoredWeight, fixed

_EVEN_AND_ODD = (0, 4)
"""Shifts of the two codes in a byte."""


class BlockType(NamedTuple):
    """A type of blocks. ``num_values``, ``num_bytes``: of a block. ``halves``: where in it its float16
    numbers begin, if it has any. ``read``: takes blocks ``[rows, blocks, num_bytes]``."""

    name: str
    num_values: int
    num_bytes: int
    halves: tuple[int, ...]
    read: Callable[[torch.Tensor], GroupedWeight]

    def row_bytes(self, in_features: int) -> int:
        return in_features // self.num_values * self.num_bytes

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return self.num_bytes * 8 / self.num_values


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


def _fields(data: torch.Tensor, shifts: tuple[int, ...], width: int, mask: int) -> torch.Tensor:
    """Returns the fields of bytes: of each ``width`` bytes all at the first shift, then all at the next.
    ``data``: ``[rows, blocks, bytes]``; the answer has ``len(shifts)`` times as many."""
    runs = data.reshape(*data.shape[:2], -1, 1, width)
    found = (runs >> torch.tensor(shifts, dtype=torch.uint8, device=data.device)[:, None]) & mask
    return found.flatten(2)


def _fifth_bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the high bits of codes of 5 bits, in their place."""
    return _fields(data, tuple(range(8)), width, 1) << 4


def _codes(blocks: torch.Tensor) -> torch.Tensor:
    """Puts the codes of a row's blocks side by side."""
    return blocks.flatten(1)


def _read_q4_0(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 2:], _EVEN_AND_ODD, 16, 15)
    return GroupedWeight(_codes(low), 4, 8, 32, _half(blocks, 0))


def _read_q4_1(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 4:], _EVEN_AND_ODD, 16, 15)
    return GroupedWeight(_codes(low), 4, 0, 32, _half(blocks, 0), minima=_half(blocks, 2))


def _read_q5_0(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 6:], _EVEN_AND_ODD, 16, 15)
    # The bits of four bytes are those of 32 codes in turn.
    codes = low | _fifth_bits(blocks[..., 2:6], 1)
    return GroupedWeight(_codes(codes), 5, 16, 32, _half(blocks, 0))


def _read_q5_1(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 8:], _EVEN_AND_ODD, 16, 15)
    codes = low | _fifth_bits(blocks[..., 4:8], 1)
    return GroupedWeight(_codes(codes), 5, 0, 32, _half(blocks, 0), minima=_half(blocks, 2))


def _read_q8_0(blocks: torch.Tensor) -> GroupedWeight:
    # A flipped sign bit is 128 added.
    return GroupedWeight(_codes(blocks[..., 2:] ^ 128), 8, 128, 32, _half(blocks, 0))


def _read_q4_k(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 16:], _EVEN_AND_ODD, 32, 15)
    return _with_inner_minima(blocks, low, 4)


def _read_q5_k(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 48:], _EVEN_AND_ODD, 32, 15)
    return _with_inner_minima(blocks, low | _fifth_bits(blocks[..., 16:48], 32), 5)


def _with_inner_minima(blocks: torch.Tensor, codes: torch.Tensor, bits: int) -> GroupedWeight:
    """Reads a block of 256, whose 8 scales and 8 minima of 6 bits take 12 bytes: the first four of each
    in the low bits of 4 bytes, the others' low halves in the last 4, with 2 bits above the former."""
    first, second, halves = blocks[..., 4:16].split(4, 2)
    scales = torch.cat([first & 63, (halves & 15) | ((first >> 6) << 4)], 2)
    minima = torch.cat([second & 63, (halves >> 4) | ((second >> 6) << 4)], 2)
    return GroupedWeight(
        _codes(codes),
        bits,
        0,
        256,
        _half(blocks, 0),
        minima=-_half(blocks, 2),
        inner_span=32,
        inner_scales=scales.flatten(1),
        inner_minima=minima.flatten(1),
    )


def _read_q6_k(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., :128], _EVEN_AND_ODD, 64, 15)
    high = _fields(blocks[..., 128:192], (0, 2, 4, 6), 32, 3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedWeight(
        _codes(low | (high << 4)),
        6,
        32,
        256,
        _half(blocks, 208),
        inner_span=16,
        inner_scales=scales.flatten(1),
    )


IQ4_VALUES = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
"""Values of the codes of IQ4_NL and IQ4_XS, plus 128."""
MXFP4_VALUES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Values of the codes of MXFP4: twice the 4-bit numbers (a sign, two bits of exponent, one of
fraction), plus 12."""


def _read_iq4_nl(blocks: torch.Tensor) -> GroupedWeight:
    low = _fields(blocks[..., 2:], _EVEN_AND_ODD, 16, 15)
    return GroupedWeight(_codes(low), 4, 128, 32, _half(blocks, 0), table=IQ4_VALUES)


def _read_iq4_xs(blocks: torch.Tensor) -> GroupedWeight:
    """Reads a block of 256, whose 8 scales of 6 bits, plus 32, have two bits each in two bytes, and
    four in the next four."""
    codes = _fields(blocks[..., 8:], _EVEN_AND_ODD, 16, 15)
    high = _fields(blocks[..., 2:4], (0, 2, 4, 6), 1, 3)
    low = _fields(blocks[..., 4:8], _EVEN_AND_ODD, 1, 15)
    scales = (low | (high << 4)).to(torch.int8) - 32
    return GroupedWeight(
        _codes(codes),
        4,
        128,
        256,
        _half(blocks, 0),
        inner_span=32,
        inner_scales=scales.flatten(1),
        table=IQ4_VALUES,
    )


def _read_mxfp4(blocks: torch.Tensor) -> GroupedWeight:
    codes = _fields(blocks[..., 1:], _EVEN_AND_ODD, 16, 15)
    return from_mxfp4(codes, blocks[..., 0])


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
        BlockType("Q4_0", 32, 18, (0,), _read_q4_0),
        BlockType("Q4_1", 32, 20, (0, 2), _read_q4_1),
        BlockType("Q5_0", 32, 22, (0,), _read_q5_0),
        BlockType("Q5_1", 32, 24, (0, 2), _read_q5_1),
        BlockType("Q8_0", 32, 34, (0,), _read_q8_0),
        BlockType("Q4_K", 256, 144, (0, 2), _read_q4_k),
        BlockType("Q5_K", 256, 176, (0, 2), _read_q5_k),
        BlockType("Q6_K", 256, 210, (208,), _read_q6_k),
        BlockType("IQ4_NL", 32, 18, (0,), _read_iq4_nl),
        BlockType("IQ4_XS", 256, 136, (0,), _read_iq4_xs),
        BlockType("MXFP4", 32, 17, (), _read_mxfp4),
    )
}
"""The types that stay as they are, by ggml's names."""
