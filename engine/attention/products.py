"""Attention written out as two batched matrix products (bmm): scores, a softmax in float32, weighted
values.

It has what torch's fused kernel lacks: soft caps, sinks, and draft trees whose rows read their keys in
the order of their text (``paths.py``). And in bf16 on CPUs it is the faster one from a few rows on:
there the fused kernel packs its keys anew for every few rows. As in transformers' own eager attention, a
score is rounded to the type of the queries.

The heads that share a key head are folded into the rows of one product, so that its keys are read once.
Heads come first and branches second, as in the store: ``[num_kv_heads, num_branches, ..]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionOptions
from engine.attention.paths import PathChunk, PathRows

FREE_KEY_MULTIPLE = 128
"""What keys are padded to where nothing depends on it: few shapes, since a kernel is made for each."""
MOST_SCORES = 1 << 21
"""Scores held at a time: long prompt chunks go through in pieces."""
MOST_HEADS_APART = 8
"""Where chunks of values are many and heads at most so many, there is a product for each head."""


@dataclass(frozen=True, slots=True)
class CallShapes:
    """How kernels are called. ``fused``: torch's fused kernel is used, where it has all that a layer
    asks for. ``tile_rows``: rows of products come in tiles of exactly so many; None: as they are, but
    padded to ``row_multiple``. ``key_multiple``: what keys are padded to. ``key_chunk``: bmm attention
    sums values over so many keys at a time, and then the sums; None: over all at once."""

    fused: bool
    tile_rows: int | None = None
    key_multiple: int = FREE_KEY_MULTIPLE
    row_multiple: int = 1
    key_chunk: int | None = None

    @property
    def padded_rows(self) -> int:
        """What numbers of rows are padded to."""
        return self.tile_rows or self.row_multiple

    def pad_keys(self, num_keys: int) -> int:
        return -(-num_keys // self.key_multiple) * self.key_multiple


@dataclass(frozen=True, slots=True)
class Limits:
    """What rows may see: all keys before ``start``, and from there on those of which ``values`` say
    infinity; of the others they say minus infinity. ``ends``: the key after the last that each row sees
    in any branch."""

    start: int
    values: torch.Tensor  # [num_branches, rows, 1, num_keys - start]
    ends: Sequence[int]  # [rows]


GatherValues = Callable[[PathChunk], torch.Tensor]
"""The values of a chunk's slots, ``[num_kv_heads, num_paths * keys of the chunk, value_dim]``."""


@dataclass(frozen=True, slots=True)
class BmmCall:
    """One call: branches that attend together, in one layer. Rows are those of all branches, equally
    many for each."""

    limits: Limits
    calls: CallShapes
    options: AttentionOptions
    paths: PathRows | None = None
    gather_values: GatherValues | None = None  # where there are paths

    def attend(
        self,
        query: torch.Tensor,  # [num_branches * rows, num_heads, key_dim]
        keys: torch.Tensor,  # [num_kv_heads, num_branches, num_keys, key_dim]
        values: torch.Tensor,  # [num_kv_heads, num_branches, num_keys, value_dim]
    ) -> torch.Tensor:
        """``[num_branches * rows, num_heads, value_dim]``. Rows go through together, or as many at a time
        as give ``MOST_SCORES``, over no more keys than they see."""
        kv_heads, branches, num_keys, dim = keys.shape
        num_rows, num_heads = query.shape[0] // branches, query.shape[1]
        share = num_heads // kv_heads
        scale = dim**-0.5 if self.options.scaling is None else self.options.scaling
        # Scaled before the product: there are fewer queries than scores.
        folded = (query * scale).view(-1, kv_heads, share, dim).transpose(0, 1)
        folded = folded.reshape(kv_heads, branches, num_rows, share, dim)
        most = MOST_SCORES // (branches * num_heads * num_keys) // self.calls.padded_rows
        most = max(1, most) * self.calls.padded_rows
        if most >= num_rows or self.paths is not None:
            output = self._attend(folded, keys, values, self.limits.values)
        else:
            output = torch.cat(
                [
                    self._piece(folded, keys, values, first, min(first + most, num_rows))
                    for first in range(0, num_rows, most)
                ],
                dim=2,
            )
        output = output.reshape(kv_heads, -1, share, values.shape[3]).transpose(0, 1)
        return output.reshape(query.shape[0], num_heads, values.shape[3])

    def _piece(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        seen = min(self.calls.pad_keys(max(self.limits.ends[first:end])), keys.shape[2])
        limits = self.limits.values[:, first:end, :, : max(0, seen - self.limits.start)]
        return self._attend(query[:, :, first:end], keys[:, :, :seen], values[:, :, :seen], limits)

    def _attend(
        self,
        query: torch.Tensor,  # [num_kv_heads, num_branches, rows, share, key_dim], scaled
        keys: torch.Tensor,
        values: torch.Tensor,
        limits: torch.Tensor,
    ) -> torch.Tensor:
        """``[num_kv_heads, num_branches, rows, share, value_dim]``"""
        shape, num_keys = query.shape[:4], keys.shape[2]
        scores = self._product(_flat(query.flatten(2, 3)), _flat(keys).transpose(1, 2), shape[3])
        options = self.options
        if options.softcap is not None or options.sinks is not None:
            scores = scores.float()
        if options.softcap is not None:
            scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
        scores = scores.view(*shape, num_keys)
        if self.paths is not None:
            _put_into_order(scores.view(shape[0], -1, shape[3], num_keys), self.paths)
        if limits.shape[3]:
            # Limited, not added to: what a masked key of another request scores may be infinite.
            masked = scores[..., num_keys - limits.shape[3] :]
            torch.minimum(masked, limits, out=masked)
        if options.sinks is not None:
            scores = torch.cat([scores, _sink_column(options.sinks, shape)], dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., :num_keys].to(query.dtype)
        return self._weigh(probs, values).view(*shape, values.shape[3])

    def _weigh(self, probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Weighted values, of each branch's rows of all heads one after another. A chunk that a row sees
        nothing of adds 0: rows with few keys have the bits they have alone."""
        share = probs.shape[3]
        weights, flat = probs.flatten(2, 3).flatten(0, 1), _flat(values)
        parts = self._chunk_parts(weights, flat, share)
        for chunk in self.paths.chunks if self.paths is not None else ():
            self._weigh_paths(parts[chunk.number], chunk, probs)
        if len(parts) == 1:
            return parts[0]
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(probs.dtype)

    def _chunk_parts(
        self, weights: torch.Tensor, values: torch.Tensor, share: int
    ) -> list[torch.Tensor]:
        """Of each chunk ``[heads and branches, rows, value_dim]``: a product for each chunk, or where
        there are more of them than heads, for each head."""
        num_keys, chunk = values.shape[1], self.calls.key_chunk
        if chunk is None or num_keys <= chunk:
            return [self._product(weights, values, share)]
        whole = num_keys // chunk
        if whole <= values.shape[0] or values.shape[0] > MOST_HEADS_APART:
            pairs = zip(weights.split(chunk, 2), values.split(chunk, 1), strict=True)
            return [self._product(*pair, share) for pair in pairs]
        end = whole * chunk
        by_head = [
            self._product(
                mine[:, :end].unflatten(1, (whole, chunk)).transpose(0, 1),
                value[:end].unflatten(0, (whole, chunk)),
                share,
            )
            for mine, value in zip(weights, values, strict=True)
        ]
        parts = list(torch.stack(by_head, dim=1))
        if end < num_keys:
            parts.append(self._product(weights[:, :, end:], values[:, end:], share))
        return parts

    def _weigh_paths(self, part: torch.Tensor, chunk: PathChunk, probs: torch.Tensor) -> None:
        """Puts what ``chunk.rows`` get of their own path's values in place of what is in ``part``."""
        assert self.gather_values is not None
        kv_heads, _, _, share, _ = probs.shape
        values = self.gather_values(chunk).to(probs.dtype)
        values = values.reshape(kv_heads * chunk.num_paths, -1, values.shape[2])
        first = chunk.number * (self.calls.key_chunk or 0)
        mine = probs.flatten(1, 2)[..., first : first + values.shape[1]].index_select(1, chunk.rows)
        mine = mine.view(kv_heads * chunk.num_paths, -1, values.shape[1])
        weighed = self._product(mine, values, share).view(kv_heads, chunk.rows.shape[0], -1)
        part.view(kv_heads, -1, weighed.shape[2]).index_copy_(1, chunk.rows, weighed)

    def _product(self, left: torch.Tensor, right: torch.Tensor, share: int) -> torch.Tensor:
        """Of two batches, the left one's rows in tiles where they have to be."""
        tile = self.calls.tile_rows
        if tile is None or left.shape[1] <= tile * share:
            return torch.bmm(left, right)
        return torch.cat([torch.bmm(rows, right) for rows in left.split(tile * share, 1)], dim=1)


def _put_into_order(scores: torch.Tensor, paths: PathRows) -> None:
    """``scores``: ``[num_kv_heads, rows of all branches, share, num_keys]``."""
    scores[:, paths.rows, :, paths.keys] = scores[:, paths.rows, :, paths.columns]


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """Heads and branches as one batch; never a copy of gathered blocks or of those in place."""
    return heads.flatten(0, 1)


def _sink_column(sinks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Each query row's sink logit: ``[num_kv_heads, num_branches, rows, share, 1]``."""
    kv_heads, branches, rows, share = shape
    column = sinks.float().view(kv_heads, 1, 1, share, 1)
    return column.expand(-1, branches, rows, -1, -1)
