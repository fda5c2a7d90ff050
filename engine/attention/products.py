"""Attention written out as two batched matrix products (bmm): scores, a softmax in float32, weighted
values.

It has what torch's fused kernel lacks (soft caps, sinks). And in bf16 on CPUs it is the faster one: there
the fused kernel packs its keys anew for every few rows, and two batched products take a quarter to a
third of its time (measured on AVX-512, 1-40 rows of 8 heads over 512-1024 keys). As in transformers'
own eager attention, a score is rounded to the type of the queries.
"""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionOptions

_MOST_SCORES = 1 << 22
"""Scores held at a time: long prompt chunks go through in pieces."""
_PROBED_ROWS = (1, 2, 3, 8, 17, 40, 100)
_PROBED_KEYS = (1, 2, 5, 8, 32)
"""In multiples of what keys are padded to."""
_PROBED_REQUESTS = (1, 2, 5, 16)
_MOST_PROBED = 1 << 19


def bmm_is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """bf16 on CPUs with instructions for it."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def bmm_attention(
    query: torch.Tensor,  # [batch, q_heads, rows, head_dim]
    keys: torch.Tensor,  # [batch, kv_heads, num_keys, head_dim]
    values: torch.Tensor,  # [batch, kv_heads, num_keys, value_dim]
    limits: torch.Tensor,  # float32, broadcasts to [batch, q_heads, rows, num_keys]
    share: int,
    options: AttentionOptions,
    in_pieces: bool,
) -> torch.Tensor:
    """``[batch, q_heads, rows, value_dim]``; ``share`` heads of a key head lie one after another in
    rows. ``limits``: infinity where a row sees a key, minus infinity elsewhere. ``in_pieces``: no
    more than ``_MOST_SCORES`` at a time."""
    repeats = query.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    rows = query.shape[2]
    most = _MOST_SCORES // (query.shape[0] * query.shape[1] * keys.shape[2])
    most = max(1, most // share) * share
    if not in_pieces or rows <= most:
        return _attend(query, keys, values, limits, share, options)
    return torch.cat(
        [
            _attend(part, keys, values, limit, share, options)
            for part, limit in zip(query.split(most, 2), limits.split(most, 2), strict=True)
        ],
        dim=2,
    )


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    limits: torch.Tensor,
    share: int,
    options: AttentionOptions,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = _product(query, keys.transpose(2, 3)).float().mul_(scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    # Limited, not added to: what a masked key of another request scores may be infinite.
    scores = torch.minimum(scores, limits, out=scores)
    if options.sinks is not None:
        scores = torch.cat([scores, _sink_column(options.sinks, scores, share)], dim=-1)
    probs = torch.softmax(scores, dim=-1)
    return _product(probs[..., : keys.shape[2]].to(query.dtype), values)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of two batches of heads; ``torch.matmul`` would copy what is transposed."""
    result = torch.bmm(_flat(left), _flat(right))
    return result.view(*left.shape[:2], *result.shape[1:])


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """``[batch * heads, ..]``; a copy, rows as they lie, where there are many of both."""
    if heads.stride(2) < heads.stride(3):
        return heads.transpose(2, 3).flatten(0, 1).transpose(1, 2)
    return heads.flatten(0, 1)


def _sink_column(sinks: torch.Tensor, scores: torch.Tensor, share: int) -> torch.Tensor:
    """Each query row's sink logit, in the rows' order: ``[batch, q_heads, rows, 1]``."""
    kv_heads = sinks.shape[0] // share
    batch, q_heads, rows, _ = scores.shape
    column = sinks.view(kv_heads, 1, share).expand(-1, rows // share, -1).reshape(kv_heads, rows)
    column = column.repeat_interleave(q_heads // kv_heads, 0)
    return column[None, :, :, None].expand(batch, -1, -1, 1).to(scores.dtype)


@torch.inference_mode()
def products_keep_bits(
    share: int, key_dim: int, value_dim: int, key_multiple: int, dtype: torch.dtype
) -> bool:
    """Whether a row's bits are the same here however many rows, keys and requests share the products.

    As in ``linear.stable_rows``, the probe's products cancel in pairs, so that what is left are the
    rounding errors of one order of summation. Keys beyond a row's own are masked, as in a step.
    """
    probe = _Probe(key_dim, value_dim, key_multiple, dtype)
    alone = probe.run(1, share, key_multiple)
    for requests in _PROBED_REQUESTS:
        for multiple in _PROBED_KEYS:
            for rows in _PROBED_ROWS:
                num_keys = multiple * key_multiple
                if requests * share * rows * num_keys > _MOST_PROBED:
                    continue
                for got, expected in zip(
                    probe.run(requests, share * rows, num_keys), alone, strict=True
                ):
                    if not torch.equal(got, expected[:1, :1].expand_as(got)):
                        return False
    return True


class _Probe:
    """One row, its keys and values, in steps of any shape."""

    def __init__(self, key_dim: int, value_dim: int, num_own: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        most = _PROBED_KEYS[-1] * num_own
        self._num_own = num_own - 3  # the other keys are padding
        row = torch.randn(key_dim, generator=generator)
        keys = torch.randn(key_dim, most, generator=generator)
        weights = torch.randn(self._num_own, generator=generator)
        values = torch.randn(most, value_dim, generator=generator)
        values[: self._num_own] = _cancelling(values[: self._num_own], -1.0)
        self._row = _cancelling(row, 1.0).to(dtype)
        self._keys = _cancelling(keys, -1.0).T.contiguous().to(dtype)
        self._weights = _cancelling(weights, 1.0).to(dtype)
        self._values = values.to(dtype)

    def run(self, requests: int, rows: int, num_keys: int) -> list[torch.Tensor]:
        """Scores, probabilities and outputs, ``[requests, rows, ..]``: everywhere those of the row."""
        query = self._row.expand(requests, rows, -1).contiguous()
        keys, values = (
            each[:num_keys].expand(requests, -1, -1) for each in (self._keys, self._values)
        )
        scores = torch.bmm(query, keys.transpose(1, 2))[..., : self._num_own]
        masked = torch.full((requests, rows, num_keys), float("-inf"))
        masked[..., : self._num_own] = scores
        weights = torch.zeros(requests, rows, num_keys, dtype=query.dtype)
        weights[..., : self._num_own] = self._weights
        probs = torch.softmax(masked, -1)[..., : self._num_own]
        return [scores, probs, torch.bmm(weights, values)]


def _cancelling(values: torch.Tensor, sign: float) -> torch.Tensor:
    """The second half of the first dimension repeats the first, times ``sign``, in another order."""
    half = values.shape[0] // 2
    values = values.clone()
    values[half : 2 * half] = sign * values[:half].flip(0)
    return values
