"""Weights in few bits of every scheme, with numbers drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.grouped_weight import GroupedWeight
from engine.weights.gguf.blocks import IQ4_VALUES, from_mxfp4
from engine.weights.rounding.gptq import round_by_inputs

Scheme = Callable[[int, int], GroupedWeight]
"""Takes output channels and input features, a multiple of 256."""


def _codes(bits: int, channels: int, features: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (channels, features), dtype=torch.uint8)


def _steps(channels: int, features: int, span: int) -> torch.Tensor:
    return (0.001 + 0.01 * torch.rand(channels, -(-features // span))).half()


def _numbers(bits: int, channels: int, features: int, span: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (channels, features // span), dtype=torch.uint8)


def _symmetric(bits: int) -> Scheme:
    return lambda *sizes: GroupedWeight(
        _codes(bits, *sizes), bits, 2 ** (bits - 1), 32, _steps(*sizes, 32)
    )


def _with_minima(bits: int) -> Scheme:
    return lambda *sizes: GroupedWeight(
        _codes(bits, *sizes), bits, 0, 32, _steps(*sizes, 32), minima=-8 * _steps(*sizes, 32)
    )


def _with_inner_numbers(bits: int) -> Scheme:
    return lambda *sizes: GroupedWeight(
        _codes(bits, *sizes), bits, 0, 256, _steps(*sizes, 256), minima=-_steps(*sizes, 256),
        inner_span=32, inner_scales=_numbers(6, *sizes, 32), inner_minima=_numbers(6, *sizes, 32),
    )  # fmt: skip


def _q6_k(*sizes: int) -> GroupedWeight:
    channels, features = sizes
    numbers = _numbers(8, channels, features, 16).view(torch.int8)
    scales = _steps(channels, features, 256)
    return GroupedWeight(_codes(6, *sizes), 6, 32, 256, scales, inner_span=16, inner_scales=numbers)


def _with_zeros(bits: int, span: int) -> Scheme:
    return lambda *sizes: GroupedWeight(
        _codes(bits, *sizes), bits, 0, span, _steps(*sizes, span),
        zeros=_numbers(bits, sizes[0], -(-sizes[1] // span) * span, span),
    )  # fmt: skip


def _from_table(*sizes: int) -> GroupedWeight:
    return GroupedWeight(_codes(4, *sizes), 4, 128, 32, _steps(*sizes, 32), table=IQ4_VALUES)


def _from_table_with_inner_numbers(*sizes: int) -> GroupedWeight:
    numbers = _numbers(6, *sizes, 32).to(torch.int8) - 32
    return GroupedWeight(
        _codes(4, *sizes), 4, 128, 256, _steps(*sizes, 256),
        inner_span=32, inner_scales=numbers, table=IQ4_VALUES,
    )  # fmt: skip


def _mxfp4(*sizes: int) -> GroupedWeight:
    channels, features = sizes
    codes = _codes(4, *sizes).view(channels, -1, 32)
    return from_mxfp4(codes, torch.randint(110, 130, codes.shape[:2], dtype=torch.uint8))


def _in_bfloat16(*sizes: int) -> GroupedWeight:
    """Scales far apart from channel to channel."""
    channels, features = sizes
    by = 10.0 ** -torch.arange(channels).remainder(9)
    scales = (_steps(channels, features, 64) * by[:, None]).bfloat16()
    return GroupedWeight(_codes(4, *sizes), 4, 8, 64, scales)


def _by_channel(*sizes: int) -> GroupedWeight:
    return GroupedWeight(_codes(4, *sizes), 4, 8, sizes[1], torch.rand(sizes[0], 1))


def _by_channel_and_row(*sizes: int) -> GroupedWeight:
    codes, scales = _codes(8, *sizes), torch.rand(sizes[0])
    return GroupedWeight(codes, 8, 128, sizes[1], None, channel_scales=scales)


SCHEMES: dict[str, Scheme] = {
    "Q4_0": _symmetric(4),
    "Q4_1": _with_minima(4),
    "Q5_0": _symmetric(5),
    "Q5_1": _with_minima(5),
    "Q8_0": _symmetric(8),
    "Q4_K": _with_inner_numbers(4),
    "Q5_K": _with_inner_numbers(5),
    "Q6_K": _q6_k,
    "IQ4_NL": _from_table,
    "IQ4_XS": _from_table_with_inner_numbers,
    "MXFP4": _mxfp4,
    "AWQ": _with_zeros(4, 128),
    "GPTQ, groups of 96": _with_zeros(4, 96),
    "GPTQ in 8 bits": _with_zeros(8, 64),
    "compressed-tensors": _in_bfloat16,
    "by channel": _by_channel,
    "W8A8": _by_channel_and_row,
}
"""Schemes by the names of formats that have them."""


def drawn_weight(scheme: str, channels: int, features: int, seed: int = 0) -> GroupedWeight:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SCHEMES[scheme](channels, features)


def channels_of(weight: GroupedWeight, first: int, end: int) -> GroupedWeight:
    """Returns some output channels of a weight."""
    parts = {
        name: value[first:end]
        for name, value in weight._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return weight._replace(**parts)


def round_to_nearest(weight: torch.Tensor, has_minima: bool = False) -> GroupedWeight:
    """Rounds each weight of ``[out_features, in_features]`` on its own, between the smallest and the
    largest of its group."""
    hessian = torch.zeros(weight.shape[1], weight.shape[1])
    return round_by_inputs(weight, hessian, has_minima, (1.0,))
