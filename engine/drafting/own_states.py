"""States of a draft model whose layers keep some: its own, beside its own keys and values.

A request's state stands behind text that was fed, and what was drafted since keeps its inputs at places.
So a text that goes on as drafted needs nothing fed again, and one that goes on otherwise begins behind
what was right. What another request has fed is of no use here: states are of one request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafters.model.protocol import DraftRows
from drafters.tree import ROOT
from kvpool.state_slots import NOWHERE, StateRows


@dataclass(slots=True)
class _Seat:
    """``num_tokens`` of the text are behind the state in ``slot``. ``drafted``: tokens that were run
    since, by the position of the slots that they took, each with the number of the one before it;
    ``ROOT``: it follows the text."""

    slot: int
    num_tokens: int = 0
    drafted: list[tuple[int, int]] = field(default_factory=list)

    def num_right(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the drafted tokens stand where the text goes on with them."""
        known = token_ids[self.num_tokens :]
        for number, (drafted, token) in enumerate(zip(self.drafted, known, strict=False)):
            if drafted != (token, number - 1):
                return number
        return min(len(self.drafted), len(known))


class OwnStates:
    """Seats of the requests that drafted last, each with ``num_places`` for drafted rows."""

    def __init__(self, num_seats: int, num_places: int) -> None:
        self._free = list(range(num_seats))
        self._num_places = num_places
        self._seats: OrderedDict[str, _Seat] = OrderedDict()

    def usable(self, request_id: str, token_ids: Sequence[int], num_valid: int) -> int:
        """Returns how many of a request's first ``num_valid`` tokens, whose keys and values are there,
        lie behind a state that can be had."""
        seat = self._seat(request_id)
        reached = seat.num_tokens + seat.num_right(token_ids)
        if num_valid < seat.num_tokens:  # a state cannot go back
            seat.num_tokens, seat.drafted = 0, []
            return 0
        return min(num_valid, reached)

    def rows(self, rows: DraftRows) -> StateRows:
        """Returns what a forward's rows do, and notes that they ran. Raises IndexError where more is
        drafted than there are places for."""
        seat = self._seat(rows.ask.request_id)
        first = rows.base - seat.num_tokens
        source = seat.slot if seat.num_tokens else NOWHERE
        places = range(seat.slot * self._num_places, (seat.slot + 1) * self._num_places)
        count = len(rows.token_ids)
        if rows.base + count <= len(rows.ask.token_ids):
            seat.num_tokens, seat.drafted = rows.base + count, []
            return StateRows(source, places[:first], target=seat.slot)
        if not rows.parents:
            told = [(token, first + at - 1) for at, token in enumerate(rows.token_ids)]
            seat.drafted[first:] = told
            kept = [places[first + at] for at in range(count)]
            return StateRows(source, places[:first], known_places=kept)
        newest = rows.parents[rows.num_stored :]
        above = [first + parent if parent != ROOT else first - 1 for parent in newest]
        seat.drafted[first + rows.num_stored :] = zip(rows.token_ids, above, strict=True)
        kept = [places[first + node] for node in range(len(rows.parents))]
        return StateRows(source, places[:first], places=kept)

    def forget(self, request_id: str) -> None:
        seat = self._seats.pop(request_id, None)
        if seat is not None:
            self._free.append(seat.slot)

    def _seat(self, request_id: str) -> _Seat:
        """Returns a request's; the one that has not drafted for longest makes room."""
        if request_id not in self._seats:
            if not self._free:
                self._free.append(self._seats.popitem(last=False)[1].slot)
            self._seats[request_id] = _Seat(self._free.pop())
        self._seats.move_to_end(request_id)
        return self._seats[request_id]
