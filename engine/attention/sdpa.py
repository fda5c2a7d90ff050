"""Attention by torch's own operations, written to be read: the reference that other backends are compared
with, and what serves devices and types that no other backend knows.

Requests with about as many rows and keys attend in one call. Their keys and values are gathered from the
store, scores are taken in float32 and limited to what each row may see, and of long prompts so many rows
at a time as give a bounded number of scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionOptions, attention_backend
from engine.batch import InputBatch, InputTensors, RequestRows
from engine.request.info import Determinism
from kvpool.store import KVStore

_MOST_SCORES = 1 << 24
"""Scores of a layer that are held at a time: 64 MiB."""

Array = np.ndarray[Any, Any]


@attention_backend("sdpa")
class SdpaAttention(AttentionBackend):
    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"fast"})

    def plan(self, batch: InputBatch, inputs: InputTensors) -> SdpaPlan:
        calls = [_Call(requests, self.store) for requests in _alike(batch.requests)]
        return SdpaPlan(self, inputs.slot_mapping, calls)


def _alike(requests: Sequence[RequestRows]) -> Iterable[list[RequestRows]]:
    """Groups requests, so that padding them to the longest at most doubles their rows and their keys."""
    groups: dict[tuple[int, int], list[RequestRows]] = defaultdict(list)
    for each in requests:
        if each.num_rows:
            groups[each.num_rows.bit_length(), each.end.bit_length()].append(each)
    return groups.values()


@dataclass(slots=True)
class SdpaPlan:
    backend: SdpaAttention
    slot_mapping: torch.Tensor
    calls: list[_Call]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.backend.write(layer, self.slot_mapping, key, value)
        output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        for call in self.calls:
            gathered = self.backend.store.gather(layer, call.slots)
            # torch's products know no 8-bit floats.
            keys, values = (call.by_request(each.to(query.dtype)) for each in gathered)
            rows = query.index_select(0, call.rows).unflatten(0, (call.num_requests, -1))
            attended = attend(rows, keys, values, call.visible(options), options)
            own = attended.flatten(0, 1).index_select(0, call.own)
            output.index_copy_(0, call.rows.index_select(0, call.own), own)
        return output


class _Call:
    """Requests that attend together, padded to the most rows and keys. ``rows``: the batch's rows
    ``[num_requests * most_rows]``, where the ones at ``own`` are not padding; ``slots``: their keys'
    slots ``[num_requests * most_keys]``."""

    def __init__(self, requests: Sequence[RequestRows], store: KVStore) -> None:
        self._requests = requests
        self._device = store.device
        self.num_requests = len(requests)
        self._most_rows = max(each.num_rows for each in requests)
        self._most_keys = max(each.end for each in requests)
        rows = np.zeros((len(requests), self._most_rows), dtype=np.int64)
        slots = np.zeros((len(requests), self._most_keys), dtype=np.int64)
        is_own = np.arange(self._most_rows) < [[each.num_rows] for each in requests]
        for index, each in enumerate(requests):
            rows[index, : each.num_rows] = np.arange(each.num_rows) + each.first_row
            blocks = np.array(each.block_table, dtype=np.int64)[:, None] * store.block_size
            lying = (blocks + np.arange(store.block_size)).reshape(-1)
            slots[index, : each.end] = lying[: each.end]
        self.rows, self.slots, self.own = (
            torch.from_numpy(each).to(self._device, non_blocking=True)
            for each in (rows.reshape(-1), slots.reshape(-1), np.flatnonzero(is_own))
        )
        self._visible: dict[tuple[int | None, bool], torch.Tensor] = {}

    def by_request(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns ``[num_requests, num_kv_heads, most_keys, dim]``."""
        parted: torch.Tensor = gathered.unflatten(1, (self.num_requests, -1))
        return parted.transpose(0, 1)

    def visible(self, options: AttentionOptions) -> torch.Tensor:
        """Returns which keys each row sees, ``[num_requests, most_rows, most_keys]`` bool; padding sees
        the first key. Made once for all layers of a window that see alike."""
        asked = options.window, options.sees_block
        if asked not in self._visible:
            seen = np.zeros((self.num_requests, self._most_rows, self._most_keys), dtype=bool)
            seen[:, :, 0] = True
            for index, each in enumerate(self._requests):
                seen[index, : each.num_rows, : each.end] = visibility(each, *asked)
            self._visible[asked] = torch.from_numpy(seen).to(self._device, non_blocking=True)
        return self._visible[asked]


def visibility(request: RequestRows, window: int | None, sees_block: bool) -> Array:
    """Returns which of its keys each row of a request sees, ``[num_rows, num_keys]`` bool: a known row
    the text up to itself, or all known text where it ``sees_block``; a draft node the known text, its
    ancestors and itself. A window counts positions, not slots."""
    root_end, end = request.known_end, request.end
    positions = np.arange(end)
    positions[root_end:] = root_end - 1 + np.array(request.depths(), dtype=np.int64)
    own = np.arange(end - request.num_rows, end)
    seen = np.arange(end) <= own[:, None]
    if sees_block:
        seen[: request.num_known, :root_end] = True
    ancestors = np.eye(len(request.parents), dtype=bool)
    for node, parent in enumerate(request.parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    seen[request.num_known :, root_end:] = ancestors[request.num_stored :]
    seen[:, : request.first_key] = False
    if window is not None:
        seen &= positions[own][:, None] - positions < window
    return seen


def attend(
    query: torch.Tensor,  # [num_requests, num_rows, num_heads, key_dim]
    keys: torch.Tensor,  # [num_requests, num_kv_heads, num_keys, key_dim]
    values: torch.Tensor,  # [num_requests, num_kv_heads, num_keys, value_dim]
    visible: torch.Tensor,  # [num_requests, num_rows, num_keys] bool
    options: AttentionOptions,
) -> torch.Tensor:
    """Returns ``[num_requests, num_rows, num_heads, value_dim]``."""
    per_row = query.shape[0] * query.shape[2] * keys.shape[2]
    pieces = zip(
        *(each.split(max(1, _MOST_SCORES // per_row), dim=1) for each in (query, visible)),
        strict=True,
    )
    return torch.cat([_attend(rows, keys, values, seen, options) for rows, seen in pieces], dim=1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    scale = query.shape[3] ** -0.5 if options.scaling is None else options.scaling
    # Heads that share a key head come one after another: [.., num_kv_heads, share, num_rows, dim].
    split = (query * scale).transpose(1, 2).unflatten(1, (keys.shape[1], -1))
    scores = (split @ keys[:, :, None].transpose(3, 4)).float()
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # Limited, not added to: what a hidden key of another request scores may be infinite.
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, *split.shape[1:3], 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:4], 1)], dim=4)
    weights = scores.softmax(dim=4)[..., : keys.shape[2]].to(values.dtype)
    output: torch.Tensor = weights @ values[:, :, None]
    return output.flatten(1, 2).transpose(1, 2)
