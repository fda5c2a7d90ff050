"""The target's hidden states, between the steps that make them and the drafters that read them.

A step's states lie where the next step's will. So those of newly committed tokens are copied, once for
all requests, and handed over when somebody needs them: before a drafter is asked, before a request leaves
its blocks or another one is to find what lies there, and before they become many. A drafter that rests is
told of many steps at once, which takes hardly longer than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from drafters.base import HiddenRows
from engine.schedule.request import Request, ScheduledRequest

if TYPE_CHECKING:
    from torch import Tensor

_MOST_STEPS = 32
_MOST_ROWS = 512


class _Part(NamedTuple):
    """A request's rows of a step: ``rows`` of those that were copied."""

    scheduled: ScheduledRequest
    rows: range

    @property
    def request_id(self) -> str:
        return self.scheduled.request.request_id


class _Step(NamedTuple):
    """``states`` by layer: ``[num_rows, hidden_size]``."""

    parts: list[_Part]
    states: Mapping[int, Tensor]
    num_rows: int


@dataclass(slots=True)
class _Stretch:
    """Consecutive tokens of a request, and the rows of their states among all that wait."""

    scheduled: ScheduledRequest
    rows: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.scheduled.base + len(self.rows)


class WaitingStates:
    """States that drafters were not told of yet."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._num_rows = 0

    @property
    def are_many(self) -> bool:
        return len(self._steps) >= _MOST_STEPS or self._num_rows >= _MOST_ROWS

    def add(self, requests: Sequence[ScheduledRequest], states: Mapping[int, Tensor]) -> None:
        """Copies the states of tokens that a step committed, for those requests whose drafters read
        some. ``states``: of all the step's rows, ``[num_rows, hidden_size]`` by layer."""
        rows: list[int] = []
        parts: list[_Part] = []
        for each in requests:
            if not each.hidden_layers:
                continue
            start = len(rows)
            first, anchor = each.rows.first_row, each.rows.first_row + each.num_known - 1
            rows += range(first, anchor + 1)
            rows += (anchor + row for row in each.accepted_rows)
            parts.append(_Part(each, range(start, len(rows))))
        if parts:
            copied = {layer: _picked(each, rows) for layer, each in states.items()}
            self._steps.append(_Step(parts, copied, len(rows)))
            self._num_rows += len(rows)

    def take(self) -> list[tuple[Request, HiddenRows]]:
        """Returns all that wait, and whose it is, each request's consecutive rows together; they wait no
        longer."""
        steps, self._steps, self._num_rows = self._steps, [], 0
        stretches = _stretches(steps)
        if not stretches:
            return []
        order = [row for each in stretches for row in each.rows]
        counts = [len(each.rows) for each in stretches]
        num_rows = sum(step.num_rows for step in steps)
        parts: dict[int, Sequence[Tensor]] = {}
        for layer in steps[0].states:
            together = _joined([step.states[layer] for step in steps])
            if order != list(range(num_rows)):
                together = _chosen(together, order)
            parts[layer] = together.split(counts)
        return [
            (
                each.scheduled.request,
                HiddenRows(
                    each.scheduled.request.request_id,
                    each.scheduled.base,
                    each.scheduled.request.token_ids,
                    tuple(parts[layer][at] for layer in each.scheduled.hidden_layers),
                    each.scheduled.rows.block_table,
                ),
            )
            for at, each in enumerate(stretches)
        ]

    def forget(self, request_id: str) -> None:
        """Nobody is to be told of this request's."""
        for step in self._steps:
            step.parts[:] = [each for each in step.parts if each.request_id != request_id]


def _picked(states: Tensor, rows: list[int]) -> Tensor:
    """Returns a copy of these rows."""
    first = rows[0]
    if rows == list(range(first, first + len(rows))):
        return states[first : first + len(rows)].clone()
    return _chosen(states, rows)


# Where nothing drafts with states, as in a simulation, there may be no torch.


def _chosen(states: Tensor, rows: list[int]) -> Tensor:
    from engine.transfer import upload

    return states.index_select(0, upload(rows, states.device))


def _joined(states: list[Tensor]) -> Tensor:
    import torch

    return states[0] if len(states) == 1 else torch.cat(states)


def _stretches(steps: Sequence[_Step]) -> list[_Stretch]:
    found: list[_Stretch] = []
    newest: dict[str, _Stretch] = {}
    start = 0
    for step in steps:
        for part in step.parts:
            stretch = newest.get(part.request_id)
            if stretch is None or stretch.end != part.scheduled.base:
                stretch = newest[part.request_id] = _Stretch(part.scheduled)
                found.append(stretch)
            stretch.rows += range(start + part.rows.start, start + part.rows.stop)
        start += step.num_rows
    return found
