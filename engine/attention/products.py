"""Attention written out as two batched matrix products (bmm): scores, a softmax in float32, weighted
values.

It has what torch's fused kernel lacks (soft caps, sinks). And in bf16 on CPUs it is the faster one: there
the fused kernel packs its keys anew for every few rows, and two batched products take a quarter to a
third of its time (measured on AVX-512, 1-40 rows of 8 heads over 512-1024 keys). As in transformers'
own eager attention, a score is rounded to the type of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionOptions

FREE_KEY_MULTIPLE = 128
"""What keys are padded to where nothing depends on it: few shapes, since a kernel is made for each."""
_MOST_SCORES = 1 << 22
"""Scores held at a time: long prompt chunks go through in pieces."""


@dataclass(frozen=True, slots=True)
class CallShapes:
    """How kernels are called. ``fused``: torch's fused kernel is used, where it has all that a layer
    asks for. ``tile_rows``: rows come in tiles of exactly so many; None: as they are, but padded to
    ``row_multiple``. ``key_multiple``: what keys are padded to. ``key_chunk``: bmm attention sums values
    over so many keys at a time, and then the sums; None: over all at once."""

    fused: bool
    tile_rows: int | None = None
    key_multiple: int = FREE_KEY_MULTIPLE
    row_multiple: int = 1
    key_chunk: int | None = None

    @property
    def padded_rows(self) -> int:
        """What numbers of rows are padded to."""
        return self.tile_rows or self.row_multiple


def bmm_attention(
    query: torch.Tensor,  # [batch, q_heads, rows, head_dim]
    keys: torch.Tensor,  # [batch, kv_heads, num_keys, head_dim]
    values: torch.Tensor,  # [batch, kv_heads, num_keys, value_dim]
    limits: torch.Tensor,  # float32, broadcasts to [batch, q_heads, rows, num_keys]
    share: int,
    options: AttentionOptions,
    calls: CallShapes,
) -> torch.Tensor:
    """``[batch, q_heads, rows, value_dim]``; ``share`` heads of a key head lie one after another in
    rows. ``limits``: infinity where a row sees a key, minus infinity elsewhere. Rows go through in
    tiles, or else as many as give ``_MOST_SCORES`` at a time."""
    repeats = query.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    step = share * calls.padded_rows
    most = _MOST_SCORES // (query.shape[0] * query.shape[1] * keys.shape[2])
    most = step if calls.tile_rows else max(1, most // step) * step
    if query.shape[2] <= most:
        return _attend(query, keys, values, limits, share, options, calls.key_chunk)
    return torch.cat(
        [
            _attend(part, keys, values, limit, share, options, calls.key_chunk)
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
    key_chunk: int | None,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = _product(query, keys.transpose(2, 3)).float().mul_(scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    # Limited, not added to: what a masked key of another request scores may be infinite.
    scores = torch.minimum(scores, limits, out=scores)
    if options.sinks is not None:
        scores = torch.cat([scores, _sink_column(options.sinks, scores, share)], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].to(query.dtype)
    if key_chunk is None or key_chunk >= keys.shape[2]:
        return _product(probs, values)
    # A chunk that a row sees nothing of adds 0: rows with few keys have the bits they have alone.
    weights, flat = _flat(probs), _flat(values)
    parts = zip(weights.split(key_chunk, 2), flat.split(key_chunk, 1), strict=True)
    total = torch.bmm(*next(parts)).float()
    for part in parts:
        total += torch.bmm(*part)
    return total.to(query.dtype).view(*query.shape[:3], values.shape[3])


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
