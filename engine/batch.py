"""From the plan of a step to the flat rows of one forward, and what the forward gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.base import NORMED as NORMED
from drafters.tree import chain_length, depths_of
from kvpool.state_slots import StateRows


@dataclass(slots=True)
class RequestRows:
    """One request's rows of a step: ``num_known`` tokens in a chain from position ``base`` on (prompt
    chunk or anchor), then draft nodes. ``parents`` as in DraftTree: -1 is the last known row. The last
    ``num_logits`` rows get logits (anchor and nodes when the request samples).

    The first ``num_stored`` nodes have no rows: they are in the store from steps before, as a draft
    model that grows its tree level by level leaves them. Then there are no known rows, and -1 is the
    token before ``base``.

    ``first_key``: no row sees a key of a slot before it; at most the first row's slot.

    ``adapter``: what changes the model for its rows (``engine.model.adapted.Adapter``); None: nothing.

    ``states``: what its rows have to do with states, where layers keep some; None: they begin anew, and
    leave nothing.

    ``num_unsure``: so many slots before ``base`` the rows may turn out to lie (``InputBatch.moved``).

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
    first_key: int = 0
    adapter: Any = None
    states: StateRows | None = None
    num_unsure: int = 0
    first_row: int = 0
    first_logit: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.parents) - self.num_stored

    @property
    def known_end(self) -> int:
        """The slot after the last known token's."""
        return self.base + self.num_known

    @property
    def end(self) -> int:
        """The slot after the last row's."""
        return self.known_end + len(self.parents)

    def depths(self) -> list[int]:
        return depths_of(self.parents)

    def is_chain(self) -> bool:
        return not self.num_stored and chain_length(self.parents) == len(self.parents)


NO_SLOT = -1
"""The slot of a row that only pads a step: it is stored nowhere."""


class Bucket(NamedTuple):
    """Sizes that steps are padded to, so that all steps of a bucket have the same shapes: so many rows,
    and room for so many requests."""

    num_rows: int
    num_requests: int


class Choices(NamedTuple):
    """How the forward itself chooses tokens, of each row with logits: ``keys`` and ``positions`` of the
    noise, and ``temperatures``; 0: the likeliest, below: no token of this row is asked for."""

    keys: list[int]
    positions: list[int]
    temperatures: list[float]

    @staticmethod
    def of_none(num_rows: int) -> Choices:
        return Choices([0] * num_rows, [0] * num_rows, [-1.0] * num_rows)

    def padded(self, num_rows: int) -> Choices:
        """Returns those of so many rows, of whose last ones no token is asked for."""
        more = Choices.of_none(num_rows - len(self.keys))
        return Choices(
            self.keys + more.keys,
            self.positions + more.positions,
            self.temperatures + more.temperatures,
        )


@dataclass(slots=True)
class InputBatch:
    """Flat rows, in the order of the requests. ``bucket``: what the rows were padded to; None: not at
    all. ``chosen``: the rows' tokens ``[num_rows]``, int64, where only the device knows them yet;
    ``token_ids`` are stand-ins then. ``choices``: None where the forward need not choose any token.
    ``moved`` ``[3, num_rows]``, int64, where only the device knows how much of the drafts before was
    accepted: positions, slots, and how many slots before their requests' ``base`` the rows lie; what is
    said elsewhere is as far on as they can be.

    ``hidden_layers``: which hidden states leave the forward. ``k`` of N layers is the residual stream
    that enters decoder layer k, before any norm; N is what leaves the last layer; ``NORMED`` are those
    behind the final norm, which the output head reads."""

    requests: Sequence[RequestRows]
    hidden_layers: tuple[int, ...] = ()
    bucket: Bucket | None = None
    chosen: torch.Tensor | None = None
    choices: Choices | None = None
    moved: torch.Tensor | None = None
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)
    """Addresses of the rows' adapters, 0 for rows that have none; empty where no row has one."""

    @property
    def is_adapted(self) -> bool:
        return bool(self.adapters)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        return sum(request.end for request in self.requests)


def build_batch(
    requests: Sequence[RequestRows], block_size: int, hidden_layers: tuple[int, ...] = ()
) -> InputBatch:
    """Lay the requests' rows one after another, and tell each where its own are."""
    batch = InputBatch(requests, hidden_layers)
    token_ids, positions = batch.token_ids, batch.positions
    slots, logits_indices = batch.slot_mapping, batch.logits_indices
    for request in requests:
        request.first_row, request.first_logit = len(token_ids), len(logits_indices)
        token_ids += request.token_ids
        end, num_rows = request.base + request.num_known, len(token_ids)
        positions += range(request.base, end)
        if request.parents:
            depths = request.depths()[request.num_stored :]
            positions += [end - 1 + depth for depth in depths]
        first, last = request.base + request.num_stored, end + len(request.parents)
        slots += slots_of(request.block_table, first, last, block_size)
        logits_indices += range(num_rows - request.num_logits, num_rows)
    if any(request.adapter is not None for request in requests):
        for request in requests:
            address = 0 if request.adapter is None else request.adapter.address
            batch.adapters += [address] * request.num_rows
    return batch


def settle(batch: InputBatch, block_size: int) -> InputBatch:
    """Waits for what only the device knows of the batch, and returns it laid out by that."""
    if batch.chosen is None:
        return batch
    token_ids = batch.chosen.tolist()
    moved = [0] * len(token_ids) if batch.moved is None else batch.moved[2].tolist()
    requests = []
    for rows in batch.requests:
        own = token_ids[rows.first_row : rows.first_row + rows.num_rows]
        base = rows.base - moved[rows.first_row]
        requests.append(replace(rows, token_ids=own, base=base))
    settled = build_batch(requests, block_size, batch.hidden_layers)
    settled.choices = batch.choices
    return settled


def pad_batch(batch: InputBatch, bucket: Bucket, num_logits: int | None = None) -> InputBatch:
    """Returns a copy of the batch, padded to the bucket's rows. Padding rows come last and belong to no
    request: their slot is ``NO_SLOT``, so nothing is stored, and their results are ignored.
    ``num_logits`` rows get logits, the batch's own first; None: as many as the bucket has."""
    num_logits = bucket.num_rows if num_logits is None else num_logits
    count = bucket.num_rows - batch.num_rows
    missing = num_logits - len(batch.logits_indices)
    return replace(
        batch,
        bucket=bucket,
        token_ids=[*batch.token_ids, *[0] * count],
        positions=[*batch.positions, *[0] * count],
        slot_mapping=[*batch.slot_mapping, *[NO_SLOT] * count],
        logits_indices=[*batch.logits_indices, *[0] * missing],
        choices=batch.choices and batch.choices.padded(num_logits),
        adapters=[*batch.adapters, *[0] * count] if batch.adapters else [],
    )


def slot_of(block_table: Sequence[int], position: int, block_size: int) -> int:
    return block_table[position // block_size] * block_size + position % block_size


def slots_of(block_table: Sequence[int], first: int, end: int, block_size: int) -> list[int]:
    """Returns the slots of the positions ``first`` .. ``end - 1``, block by block."""
    slots: list[int] = []
    while first < end:
        slot = slot_of(block_table, first, block_size)
        num_slots = min(block_size - first % block_size, end - first)
        slots += range(slot, slot + num_slots)
        first += num_slots
    return slots


class InputTensors(NamedTuple):
    """A batch on the device, each ``[num_rows]`` int64 but for ``logits_indices``, of at least one.
    ``adapters`` and, of the rows with logits, ``logits_adapters`` are empty where no row has one; so are
    ``Choices`` (``temperatures`` are float64), where there are none."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_indices: torch.Tensor
    adapters: torch.Tensor
    logits_adapters: torch.Tensor
    noise_keys: torch.Tensor
    noise_positions: torch.Tensor
    temperatures: torch.Tensor


_MOST_VIEWS = 256
"""Sizes of batches whose views of their inputs are kept: to make them takes longer than to fill them."""


class _InputMemory:
    """Memory for batches' inputs: on the ``device``, and as an ``array`` where the host may write it."""

    def __init__(self, device: torch.Tensor) -> None:
        self.device = device
        self.array: NDArray[np.int64] | None = None if device.is_cuda else device.numpy()
        self._views: dict[tuple[int, ...], InputTensors] = {}

    def views(self, num_rows: int, lengths: tuple[int, ...]) -> InputTensors:
        """Returns columns of so many numbers each, which begin ``num_rows`` apart."""
        found = self._views.get((num_rows, *lengths))
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            rows = self.device[: len(lengths) * num_rows].view(-1, num_rows)
            views = (row[:length] for row, length in zip(rows, lengths, strict=True))
            found = InputTensors(*views)
            found = found._replace(temperatures=found.temperatures.view(torch.float64))
            self._views[num_rows, *lengths] = found
        return found


class InputBuffers:
    """Device memory that every step's inputs come in, in one copy: views at the same addresses for equal
    numbers of rows, so that a captured step can be run again. ``max_num_rows`` is an estimate: a larger
    batch gets larger memory of its own.

    Copies to a GPU come from pinned memory that is taken anew each time, and used again once they are
    done: several steps may be launched ahead.
    """

    def __init__(self, device: torch.device, max_num_rows: int) -> None:
        self._device = device
        self._memories: list[_InputMemory] = []
        self._grow(max_num_rows)

    def fill(self, batch: InputBatch) -> InputTensors:
        """Valid until the next fill."""
        # A step of prompt chunks alone needs no logits, but models want at least one row.
        logits_indices = batch.logits_indices or [0]
        of_logits = [batch.adapters[row] for row in logits_indices] if batch.adapters else []
        keys, positions, temperatures = batch.choices or Choices.of_none(0)
        columns = (
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            logits_indices,
            batch.adapters,
            of_logits,
            keys,
            positions,
            np.array(temperatures).view(np.int64).tolist() if temperatures else (),
        )
        num_rows = max(batch.num_rows, 1)
        end = len(columns) * num_rows
        if end > len(self._memories[-1].device):
            self._grow(2 * num_rows)
        memory = next(each for each in self._memories if end <= len(each.device))
        host, array = None, memory.array
        if array is None:
            host = torch.empty(end, dtype=torch.long, pin_memory=True)
            array = host.numpy()
        for first, values in zip(range(0, end, num_rows), columns, strict=True):
            if values:
                array[first : first + len(values)] = values
        if host is not None:
            memory.device[:end].copy_(host, non_blocking=True)
        tensors = memory.views(num_rows, tuple(map(len, columns)))
        if batch.chosen is not None:
            tensors.token_ids[: len(batch.chosen)].copy_(batch.chosen)
        if batch.moved is not None:
            num_moved = batch.moved.shape[1]
            tensors.positions[:num_moved].copy_(batch.moved[0])
            tensors.slot_mapping[:num_moved].copy_(batch.moved[1])
        return tensors

    def _grow(self, num_rows: int) -> None:
        count = len(InputTensors._fields) * num_rows
        memory = torch.zeros(count, dtype=torch.long, device=self._device)
        self._memories.append(_InputMemory(memory))


class ForwardOutput(NamedTuple):
    """``logits``: ``[num_logits, vocab_size]``, the rows of ``logits_indices``, in the model's type.
    ``hidden``: ``[num_rows, hidden_size]`` for each of the batch's ``hidden_layers``, in their order.
    Both are valid until the next forward, which may overwrite them. ``seconds``: device time, once it
    is done; None: it was done when the forward returned. ``tokens``: the results of ``choices``,
    ``[num_logits]`` int64, in separate memory; None: the forward chose none. ``took_longer``: than the
    next of its kind will."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    seconds: Callable[[], float] | None = None
    tokens: torch.Tensor | None = None
    took_longer: bool = False

    def with_own_logits(self) -> ForwardOutput:
        """Returns it with logits in separate memory. Readers of hidden states copy the rows they keep."""
        return self._replace(logits=self.logits.clone())
