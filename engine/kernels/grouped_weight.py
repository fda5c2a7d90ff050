"""A weight matrix in few bits: codes, and what they mean by groups of features.

Every scheme that checkpoints use for linear layers is a case of one sum. Of output channel ``o`` and
input feature ``f`` the weight is

    channel_scales[o] * (scales[o, f // span] * inner_scales[o, f // inner_span]
                            * (codes[o, f] - zero - zeros[o, f // span])
                         + minima[o, f // span] * inner_minima[o, f // inner_span])

where what a scheme does not have is 1 for a scale and 0 for the rest. Nothing is rounded anew: the file's
own numbers are held.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class UnpackableError(ValueError):
    """Weights of a scheme that no kernel has, or that would be rounded if they were packed."""


class GroupedWeight(NamedTuple):
    """Weights ``[out_features, in_features]`` of a linear layer, or of some of its output channels.

    ``codes``: ``[out_features, in_features]`` uint8, each below ``2 ** bits``; ``bits``: 4, 5, 6 or 8; or
    floats of 8 bits, which stand for themselves.
    ``zero``: subtracted from every code. ``span``: features that share a scale, a multiple of 32 (the
    last may have fewer). ``scales``: ``[out_features, spans]`` float16, bfloat16 or float32. ``zeros``:
    ``[out_features, spans]`` uint8, subtracted from codes, too. ``minima``: ``[out_features, spans]`` of
    the type of ``scales``, added. ``inner_scales`` (uint8 or int8) and ``inner_minima`` (uint8): whole
    numbers ``[out_features, in_features / inner_span]``; ``inner_span``: 16 or 32. ``channel_scales``:
    ``[out_features]`` float32. ``scales`` None: there are channels' scales alone, and inputs have one
    scale for each row. ``table``: 16 whole numbers below 256 that codes of 4 bits stand for, in the sum
    above, too.
    """

    codes: torch.Tensor
    bits: int
    zero: int
    span: int
    scales: torch.Tensor | None
    zeros: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    inner_span: int = 0
    inner_scales: torch.Tensor | None = None
    inner_minima: torch.Tensor | None = None
    channel_scales: torch.Tensor | None = None
    table: tuple[int, ...] = ()

    @property
    def values(self) -> torch.Tensor:
        """Returns the codes, or what they stand for, ``[out_features, in_features]`` uint8; or
        bf16, which holds floats of 8 bits and is read in half the time."""
        if self.codes.is_floating_point():
            return self.codes.bfloat16()
        if not self.table:
            return self.codes
        table = torch.tensor(self.table, dtype=torch.uint8, device=self.codes.device)
        return table[self.codes.long()]

    def dequantized(self) -> torch.Tensor:
        """Returns the weights ``[out_features, in_features]`` in float32, in the order of the sum above;
        each product and sum is rounded once."""
        values = self.values.float() - self.zero
        if self.zeros is not None:
            values = values - self._spread(self.zeros, self.span)
        if self.scales is not None:
            steps = self._spread(self.scales, self.span)
            if self.inner_scales is not None:
                steps = steps * self._spread(self.inner_scales, self.inner_span)
            values = steps * values
        if self.minima is not None:
            least = self._spread(self.minima, self.span)
            if self.inner_minima is not None:
                least = least * self._spread(self.inner_minima, self.inner_span)
            values = values + least
        return values if self.channel_scales is None else self.channel_scales[:, None] * values

    def weighing(self, feature: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns by what a feature's codes, less ``zero``, are multiplied, and what is added then:
        ``[out_features]`` float32 each, or None. Zero points are added as scales times their number."""
        if self.scales is None:
            return None, None
        span = feature // self.span
        scale = self.scales[:, span].float()
        if self.inner_scales is not None:
            scale = scale * self.inner_scales[:, feature // self.inner_span]
        if self.zeros is not None:
            return scale, -scale * self.zeros[:, span]
        least = None if self.minima is None else self.minima[:, span].float()
        if least is not None and self.inner_minima is not None:
            least = least * self.inner_minima[:, feature // self.inner_span]
        return scale, least

    def _spread(self, numbers: torch.Tensor, span: int) -> torch.Tensor:
        """One number per feature."""
        return numbers.float().repeat_interleave(span, 1)[:, : self.codes.shape[1]]
