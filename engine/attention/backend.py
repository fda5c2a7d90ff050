"""Tree-masked attention over the block KV store, plugged into transformers' attention interface.

All rows of a step go through a model as one flat batch of shape ``[1, num_rows]``. Here each layer's new
keys and values are written to their slots, every request's blocks are gathered, and its rows attend to
the committed past and to their own ancestors. Rows reach a model's attention modules through the
``slipstream_step`` keyword, which transformers hands down untouched, so no modeling code is copied.

Exactness. A kernel gives a row the same bits whenever it is called with the same *shapes*; what
changes bits is a different number of rows or keys. So in exact mode the fused kernel gets its rows in
tiles of a fixed number of rows, and keys, in the order of the text, padded to multiples of 512, the
split of torch's CPU flash kernel.
(Measured on AVX-512 without AMX: 0 of 27,540 rows differed in bf16 and fp32; without tiles 10-90 %.)
Where attention is written out as products, a probe at load asks whether shapes matter at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from engine.attention.groups import AttentionGroup, GroupedRows
from engine.attention.products import AttentionOptions, attend_by_products
from kvpool.store import KVStore

IMPLEMENTATION = "slipstream"

_LARGEST_KEY = 2.0**60
"""Beyond all use, and far enough from the largest float for sums of products to stay finite."""


class Step(Protocol):
    """What answers a model's attention layers: a real step, or the loader's shape probe."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows, num_heads, head_dim]
        key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
        options: AttentionOptions,
    ) -> torch.Tensor:
        """``[num_rows, num_heads, value_dim]``."""


@dataclass(slots=True)
class AttentionStep:
    """One forward's attention over a store: rows are written first, then every group attends."""

    store: KVStore
    slots: torch.Tensor  # [num_rows] int64
    rows: GroupedRows
    fused: bool = True
    """False: torch's fused kernel is not used even where it has all that a layer asks for."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        # A masked key weighs 0, but 0 times NaN is NaN, and so is a product's infinity less infinity:
        # what one request overflows must not reach those who read its blocks masked, beside it or
        # after it.
        key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        largest = min(_LARGEST_KEY, torch.finfo(key.dtype).max)
        key = key.clamp_(-largest, largest)
        self.store.write(layer, self.slots, key, value)
        fused = self.fused and options.softcap is None and options.sinks is None
        outputs = [
            _attend(self.store, group, layer, query, options, fused) for group in self.rows.groups
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if self.rows.order is None else output.index_select(0, self.rows.order)


def _mask(
    group: AttentionGroup,
    window: int | None,
    share: int,
    num_kv_heads: int,
    like: torch.Tensor,
    additive: bool,
) -> torch.Tensor:
    """What rows may see, in the shape of the kernel's call (see ``_attend``): to be added to scores, or
    their limits (see ``attend_by_products``). Once per step and kind."""
    key = (window, share, num_kv_heads, additive)
    mask = group.masks.get(key)
    if mask is not None:
        return mask
    visible = group.visible
    if window is not None:
        distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
        visible = visible & (distance < window)
    requests, rows, keys = visible.shape
    tiles, tile = group.num_tiles, group.tile_rows
    seen = 0.0 if additive else float("inf")
    mask = torch.full((requests, rows, 1, keys), seen, dtype=like.dtype if additive else None)
    mask.masked_fill_(torch.from_numpy(~visible).unsqueeze(2), float("-inf"))
    mask = mask.to(like.device, non_blocking=True)
    mask = mask.expand(-1, -1, share, -1).reshape(requests, tiles, tile * share, keys)
    if requests == 1:
        mask = mask.transpose(0, 1)  # [tiles, 1, tile * share, num_keys]
    elif tiles > 1:
        mask = mask.unsqueeze(1).expand(-1, num_kv_heads, -1, -1, -1).flatten(1, 2)
    group.masks[key] = mask
    return mask


def slipstream_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slipstream_step: Step | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; returns ``[1, num_rows, num_heads, value_dim]``.

    Raises RuntimeError where a model does not hand the step down or brings a mask of its own.
    """
    if slipstream_step is None:
        raise RuntimeError("the model does not pass attention keywords down to its layers")
    if attention_mask is not None or dropout:
        raise RuntimeError("the model's attention layers bring a mask or dropout of their own")
    output = slipstream_step.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(scaling, sliding_window, softcap, s_aux),
    )
    return output.unsqueeze(0), None


def _attend(
    store: KVStore,
    group: AttentionGroup,
    layer: int,
    query: torch.Tensor,  # [num_rows, num_heads, head_dim]
    options: AttentionOptions,
    fused: bool,
) -> torch.Tensor:
    """One group's attention: ``[group_rows, num_heads, value_dim]``."""
    keys, values = _gather(store, group, layer)
    if store.dtype.itemsize == 1:  # a draft model's; the kernels know no 8-bit floats
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    num_kv_heads = keys.shape[1]
    num_heads, head_dim = query.shape[1], query.shape[2]
    share = num_heads // num_kv_heads
    requests, rows = group.num_requests, group.rows_per_request
    tile, tiles = group.tile_rows, group.num_tiles

    if group.query_rows is None:
        mine = query[group.first_row : group.first_row + group.num_rows]
    else:
        mine = query.index_select(0, group.query_rows)
    # The heads that share a key head become rows of one product: [requests, kv_heads * tiles, ...].
    mine = mine.view(requests, rows, num_kv_heads, share, head_dim).permute(0, 2, 1, 3, 4)
    mine = mine.reshape(requests, num_kv_heads * tiles, tile * share, head_dim)
    mask = _mask(group, options.window, share, num_kv_heads, query, additive=fused)
    if requests == 1 and tiles > 1:
        # One request: its tiles are a batch over the same keys, and heads share the mask.
        mine = mine.view(num_kv_heads, tiles, tile * share, head_dim).transpose(0, 1)
        keys, values = keys.expand(tiles, -1, -1, -1), values.expand(tiles, -1, -1, -1)
    if fused:
        output = F.scaled_dot_product_attention(
            mine,
            keys,
            values,
            attn_mask=mask,
            scale=options.scaling,
            enable_gqa=mine.shape[1] != keys.shape[1],
        )
    else:
        output = attend_by_products(
            mine, keys, values, mask, share, options, in_pieces=not group.is_tiled
        )
    if requests == 1 and tiles > 1:
        output = output.transpose(0, 1)
    output = output.reshape(requests, num_kv_heads, rows, share, -1).permute(0, 2, 1, 3, 4)
    output = output.reshape(requests * rows, num_heads, -1)
    return output if group.output_rows is None else output.index_select(0, group.output_rows)


def _gather(store: KVStore, group: AttentionGroup, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[num_requests, num_kv_heads, num_keys, dim]``, without a copy if they lie
    together in the store."""
    num_ids = group.block_ids.shape[0]
    first = group.contiguous_from
    if first is not None and first + num_ids <= store.num_blocks:
        keys, values = store.slice_blocks(layer, first, num_ids)
    else:
        keys, values = store.gather_blocks(layer, group.block_ids)
        if group.path_slots is not None and group.path_keys is not None:
            for gathered, stored in ((keys, store.key[layer]), (values, store.value[layer])):
                path = stored.index_select(0, group.path_slots)
                gathered.view(-1, *stored.shape[1:]).index_copy_(0, group.path_keys, path)
    shape = (group.num_requests, group.visible.shape[2])
    return (
        keys.view(*shape, *keys.shape[2:]).transpose(1, 2),
        values.view(*shape, *values.shape[2:]).transpose(1, 2),
    )


AttentionInterface.register(IMPLEMENTATION, slipstream_attention)
