"""From the plan of a step to the flat rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_ROWS_ALONE = 32
"""Requests with more rows than this in a step (prompt chunks) attend by themselves: padding every
decoding neighbour to their length would cost more than a second call."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's rows of a step: ``num_known`` tokens in a chain (prompt chunk or anchor), then
    draft nodes. ``parents`` as in DraftTree: -1 is the last known row.

    The first ``num_stored`` nodes have no rows: they are in the store from steps before, as a draft
    model that grows its tree level by level leaves them. Then there are no known rows, and -1 is the
    token before ``base``.
    """

    first_row: int
    num_known: int
    base: int
    parents: Sequence[int]
    block_table: Sequence[int]
    num_stored: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.parents) - self.num_stored

    @property
    def end(self) -> int:
        """The slot after the last row's."""
        return self.base + self.num_known + len(self.parents)

    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def is_chain(self) -> bool:
        return not self.num_stored and all(
            parent == index - 1 for index, parent in enumerate(self.parents)
        )


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request's part in a step: ``token_ids`` are its known tokens from ``base`` on, then its draft
    nodes; ``num_logit_rows`` of its last rows get logits (anchor and nodes when it samples).

    ``num_stored``: so many of the first nodes have no row, as in ``RequestRows``."""

    token_ids: Sequence[int]
    num_known: int
    base: int
    parents: Sequence[int]
    block_table: Sequence[int]
    num_logit_rows: int
    num_stored: int = 0


@dataclass(slots=True)
class InputBatch:
    """Flat rows; ``first_row[i]`` is where request i's rows start, ``first_logit_row[i]`` its logits.

    ``wants_hidden``: somebody will ask the runner for hidden states after the forward.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    requests: list[RequestRows] = field(default_factory=list)
    first_logit_row: list[int] = field(default_factory=list)
    first_row: list[int] = field(default_factory=list)
    wants_hidden: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_kv_tokens(self) -> int:
        return sum(request.end for request in self.requests)


def build_batch(requests: Sequence[BatchRequest], block_size: int) -> InputBatch:
    """Lay the requests' rows one after another, long chunks first (attention wants its shared
    group consecutive); ``first_logit_row`` keeps the order of ``requests``."""
    batch = InputBatch(first_logit_row=[0] * len(requests), first_row=[0] * len(requests))
    order = sorted(
        range(len(requests)), key=lambda index: len(requests[index].token_ids) <= NUM_ROWS_ALONE
    )
    for index in order:
        request = requests[index]
        rows = RequestRows(
            len(batch.token_ids),
            request.num_known,
            request.base,
            request.parents,
            request.block_table,
            request.num_stored,
        )
        num_rows = len(request.token_ids)
        end = rows.first_row + num_rows
        batch.requests.append(rows)
        batch.token_ids.extend(request.token_ids)
        batch.positions.extend(range(request.base, request.base + request.num_known))
        anchor = request.base + request.num_known - 1
        batch.positions.extend(anchor + depth for depth in rows.depths()[request.num_stored :])
        first_slot = request.base + request.num_stored
        batch.slots.extend(_slots(request.block_table, first_slot, num_rows, block_size))
        batch.first_row[index] = rows.first_row
        batch.first_logit_row[index] = len(batch.logit_rows)
        batch.logit_rows.extend(range(end - request.num_logit_rows, end))
    return batch


def slot_of(block_table: Sequence[int], position: int, block_size: int) -> int:
    return block_table[position // block_size] * block_size + position % block_size


def _slots(block_table: Sequence[int], base: int, count: int, block_size: int) -> list[int]:
    return [slot_of(block_table, position, block_size) for position in range(base, base + count)]
