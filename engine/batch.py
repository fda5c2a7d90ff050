"""From the plan of a step to the flat rows of one forward, and what the forward gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from drafters.tree import chain_length, depths_of


@dataclass(slots=True)
class RequestRows:
    """One request's rows of a step: ``num_known`` tokens in a chain from position ``base`` on (prompt
    chunk or anchor), then draft nodes. ``parents`` as in DraftTree: -1 is the last known row. The last
    ``num_logits`` rows get logits (anchor and nodes when the request samples).

    The first ``num_stored`` nodes have no rows: they are in the store from steps before, as a draft
    model that grows its tree level by level leaves them. Then there are no known rows, and -1 is the
    token before ``base``.

    ``first_row``, ``first_logit``: where its rows begin in the batch, and its logits among the batch's;
    ``build_batch`` says so.
    """

    token_ids: Sequence[int]
    num_known: int
    base: int
    parents: Sequence[int]
    block_table: Sequence[int]
    num_logits: int
    num_stored: int = 0
    first_row: int = 0
    first_logit: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.parents) - self.num_stored

    @property
    def end(self) -> int:
        """The slot after the last row's."""
        return self.base + self.num_known + len(self.parents)

    def depths(self) -> list[int]:
        return depths_of(self.parents)

    def is_chain(self) -> bool:
        return not self.num_stored and chain_length(self.parents) == len(self.parents)


@dataclass(slots=True)
class InputBatch:
    """Flat rows, in the order of the requests. ``wants_hidden``: the forward also returns what the output
    head read."""

    requests: Sequence[RequestRows]
    wants_hidden: bool = False
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        return sum(request.end for request in self.requests)


def build_batch(
    requests: Sequence[RequestRows], block_size: int, wants_hidden: bool = False
) -> InputBatch:
    """Lay the requests' rows one after another, and tell each where its own are."""
    batch = InputBatch(requests, wants_hidden)
    for request in requests:
        request.first_row = len(batch.token_ids)
        request.first_logit = len(batch.logits_indices)
        end = request.first_row + request.num_rows
        batch.token_ids += request.token_ids
        anchor = request.base + request.num_known - 1
        batch.positions += range(request.base, anchor + 1)
        if request.parents:
            depths = request.depths()[request.num_stored :]
            batch.positions += [anchor + depth for depth in depths]
        batch.slot_mapping += _slots(
            request.block_table, request.base + request.num_stored, request.end, block_size
        )
        batch.logits_indices += range(end - request.num_logits, end)
    return batch


def slot_of(block_table: Sequence[int], position: int, block_size: int) -> int:
    return block_table[position // block_size] * block_size + position % block_size


def _slots(block_table: Sequence[int], first: int, end: int, block_size: int) -> list[int]:
    """Slots of the positions ``first`` .. ``end - 1``, block by block."""
    slots: list[int] = []
    while first < end:
        slot = slot_of(block_table, first, block_size)
        num_slots = min(block_size - first % block_size, end - first)
        slots += range(slot, slot + num_slots)
        first += num_slots
    return slots


class InputTensors(NamedTuple):
    """A batch on the device, each ``[num_rows]`` int64 but for ``logits_indices``, of at least one."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_indices: torch.Tensor


class InputBuffers:
    """Device memory that every step's inputs come in: views at the same addresses, so that a captured
    step can be run again. ``max_num_rows`` is an estimate: a larger batch gets larger buffers.
    """

    def __init__(self, device: torch.device, max_num_rows: int) -> None:
        self._device = device
        self._allocate(max_num_rows)

    def _allocate(self, num_rows: int) -> None:
        shape = (len(InputTensors._fields), num_rows)
        self._tensors = torch.zeros(shape, dtype=torch.long, device=self._device)
        self._host, self._copied = self._tensors, None
        if self._device.type == "cuda":
            self._host = torch.zeros(shape, dtype=torch.long, pin_memory=True)
            self._copied = torch.cuda.Event()
        self._array = self._host.numpy()

    def fill(self, batch: InputBatch) -> InputTensors:
        """Valid until the next fill."""
        if self._copied is not None:
            self._copied.synchronize()  # The copy of the last step's may still be reading.
        if batch.num_rows > self._tensors.shape[1]:
            self._allocate(max(batch.num_rows, 2 * self._tensors.shape[1]))
        # A step of prompt chunks alone needs no logits, but models want at least one row.
        columns = (
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.logits_indices or [0],
        )
        views = []
        for index, values in enumerate(columns):
            self._array[index, : len(values)] = values
            views.append(self._tensors[index, : len(values)])
            if self._copied is not None:
                views[-1].copy_(self._host[index, : len(values)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return InputTensors(*views)


class ForwardOutput(NamedTuple):
    """``logits``: ``[num_logits, vocab_size]``, those of ``logits_indices``, in the model's type.
    ``hidden``: ``[num_rows, hidden_size]``, what the output head reads, where the batch wants it."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None

    def copy(self) -> ForwardOutput:
        """In memory of its own."""
        hidden = None if self.hidden is None else self.hidden.clone()
        return ForwardOutput(self.logits.clone(), hidden)
