"""Codes packed into words of 32 bits, the first in the lowest bits, and linear layers that hold them."""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels.grouped_weight import GroupedWeight
from engine.request.errors import UnsupportedModelError
from engine.weights.index import TensorIndex
from engine.weights.layer import StoredLinear

SCALES = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes uint8 ``[rows, n * 32 / bits]`` of words int32 ``[rows, n]``; ``bits``: 4 or
    8."""
    octets = words.reshape(-1).view(torch.uint8).view(len(words), 4 * words.shape[1])
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def num_words(codes: int, bits: int) -> int:
    """Returns how many words so many codes take."""
    return -(-codes * bits // 32)


def describe(bits: int, span: int | None, has_zeros: bool) -> str:
    """Returns a scheme's description for users. ``span``: features that share a scale, None: a row."""
    scales = "a scale per channel" if span is None else f"groups of {span}"
    return f"{bits} bits, {scales}" + ", zero points" * has_zeros


class WordsLinear(StoredLinear):
    """A linear layer of whole-number codes, with a scale and maybe a zero point for each group of
    features.

    ``code_bits``: 4 or 8. ``span``: features in a group. Files differ in how they lay out codes, scales
    and zero points, which is all that formats add. What follows from the tensors' values is known after
    ``loaded``.
    """

    zeros: torch.Tensor | None

    def __init__(
        self, name: str, linear: nn.Linear, tensors: TensorIndex, code_bits: int, group_size: int
    ) -> None:
        """``group_size``: -1: a row. ``tensors``: among which there may be a bias that the model does not
        have; it is added."""
        has_bias = linear.bias is not None or f"{name}.bias" in tensors
        super().__init__(linear.in_features, linear.out_features, has_bias, linear.weight.dtype)
        self.code_bits = code_bits
        # What a configuration claims takes no memory beyond a row.
        self.span = linear.in_features if group_size == -1 else min(group_size, linear.in_features)
        self.num_groups = -(-linear.in_features // self.span)
        self.zero = 0
        self.register_buffer("zeros", None, persistent=False)

    def codes(self, first: int, end: int) -> torch.Tensor:
        """Returns uint8 ``[end - first, in_features]``, columns in the order of ``order``."""
        raise NotImplementedError

    def group_scales(self, first: int, end: int) -> torch.Tensor:
        """Returns ``[end - first, groups]``, of the type that is stored."""
        raise NotImplementedError

    def part(self, first: int, end: int) -> GroupedWeight:
        zeros = None if self.zeros is None else self.zeros[first:end]
        return GroupedWeight(
            codes=self.codes(first, end),
            bits=self.code_bits,
            zero=self.zero,
            span=self.span,
            scales=self.group_scales(first, end),
            zeros=zeros,
        )

    def _set_zeros(self, zeros: torch.Tensor | None) -> None:
        """Takes the zero points ``[out_features, groups]`` uint8; None: the middle of the codes. A zero
        point that all groups have is one number."""
        if zeros is None:
            self.zero = 1 << (self.code_bits - 1)
        elif bool((zeros == zeros[0, 0]).all()):
            self.zero = int(zeros[0, 0])
        else:
            self.zeros = zeros.contiguous()

    def _set_order(self, name: str, groups: torch.Tensor) -> None:
        """Takes each feature's group, ``[in_features]``: the columns are sorted by it, in the features'
        order within a group. Raises UnsupportedModelError where groups have other sizes than they say."""
        last = self.num_groups - 1
        wanted = torch.full((self.num_groups,), self.span)
        wanted[last] = self.in_features - last * self.span
        groups = groups.cpu().long()
        fits = int(groups.min()) >= 0 and int(groups.max()) <= last
        if not fits or not torch.equal(groups.bincount(minlength=len(wanted)), wanted):
            raise UnsupportedModelError(
                f"{name} does not give each of {self.num_groups} groups {self.span} features"
            )
        order = groups.argsort(stable=True)
        if not torch.equal(order, torch.arange(len(order))):
            self.order = order

    def _in_order(self, codes: torch.Tensor) -> torch.Tensor:
        """Returns codes ``[channels, in_features]``, given in the features' order, in the columns'."""
        return codes if self.order is None else codes[:, self.order.to(codes.device)]

    def _describe(self, group_size: int, scale_bits: int, has_zeros: bool) -> None:
        span = None if group_size == -1 else group_size
        self.scheme = describe(self.code_bits, span, has_zeros)
        beside = scale_bits + self.code_bits * has_zeros
        self.bits = self.code_bits + beside * self.num_groups / self.in_features
