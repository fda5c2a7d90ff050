"""``prediction``: the client says what the output will mostly be (OpenAI's Predicted Outputs).

In step with the prediction, the next token is its next one. After a token that differs, the text's last
tokens are held against the places where one would expect to be; where they say nothing yet, replacement
and insertion remain as guesses. Trees follow several places at once while it is not certain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drafters.base import (
    Drafter,
    DrafterInfo,
    DraftRequest,
    NewRequest,
    Observation,
    RequestState,
    drafter,
)
from drafters.contexts import num_equal_before
from drafters.tree import EMPTY, ROOT, DraftTree, TreeBuilder

_BUCKET_STARTS = (0, 1, 2, 3, 5, 9, 17, 33)
_NUM_RANKS = 4
_OTHERS_DEPTH = 3
_LONGEST_MATCH = 8
_NEARBY = 16
"""A single equal token is believed within so many tokens of where it is expected."""
_MOST_PER_SIDE = 4
_SOLID_RUN = 4
"""Equal tokens in a row after which a place is taken for certain and the break forgotten."""


def run_feature(run: int, rank: int) -> int:
    """Returns the bucket of (equal tokens before the node, rank of its place): 0..31."""
    bucket = sum(run >= start for start in _BUCKET_STARTS) - 1
    return bucket * _NUM_RANKS + min(rank, _NUM_RANKS - 1)


@drafter
class PredictionDrafter(Drafter):
    """See the module. Without a prediction a request is never drafted for."""

    info = DrafterInfo(
        "prediction",
        "Follows the request's `prediction`, the text its output is expected to repeat for the most "
        "part, and finds its place again after every change.",
        cost="Microseconds of CPU time; no model.",
        takes_prediction=True,
    )

    def start(self, request: NewRequest) -> PredictionState:
        return PredictionState(len(request.token_ids))

    def predict(self, request_id: str, prediction_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        self._states[request_id].aligner = PredictionAligner(prediction_token_ids)


class PredictionState(RequestState):
    """One request. ``num_seen``: tokens of its text that the aligner has been told of."""

    def __init__(self, num_seen: int) -> None:
        self._num_seen = num_seen
        self.aligner: PredictionAligner | None = None

    def observe(self, observation: Observation) -> None:
        self._catch_up(observation.token_ids)

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        if self.aligner is not None:
            for token_id in token_ids[self._num_seen :]:
                self.aligner.append(token_id)
        self._num_seen = len(token_ids)

    def propose(self, request: DraftRequest) -> DraftTree:
        self._catch_up(request.token_ids)
        aligner = self.aligner
        if aligner is None:
            return EMPTY
        places = aligner.places(request.shape.width)
        builder = TreeBuilder()
        for rank, (place, num_nodes) in enumerate(
            zip(places, _shares(places, request), strict=True)
        ):
            node = ROOT
            coming = aligner.token_ids[place.position : place.position + num_nodes]
            for run, token_id in enumerate(coming, start=place.run):
                node = builder.add(node, token_id, run_feature(run, rank))
        return builder.best(request.max_nodes)


def _shares(places: Sequence[Place], request: DraftRequest) -> list[int]:
    """Returns nodes for each place: alike while nothing speaks for one of them, else most for the first
    and enough for the others to find out."""
    if not places:
        return []
    num_places = len(places)
    others = request.max_nodes // num_places
    if places[0].run > 0:
        others = min(_OTHERS_DEPTH, others)
    first = request.max_nodes - others * (num_places - 1)
    return [min(share, request.shape.depth) for share in (first, *[others] * (num_places - 1))]


class Place(NamedTuple):
    """``position``: of the prediction's token that should come next. ``run``: how many equal tokens
    lead there."""

    position: int
    run: int


class PredictionAligner:
    """Follows a growing text along a prediction. Memory: the prediction and one index entry per token."""

    def __init__(self, prediction_token_ids: Sequence[int]) -> None:
        self.token_ids = list(prediction_token_ids)
        self._ends: dict[tuple[int, int], list[int]] = {}
        for end in range(1, len(self.token_ids)):
            self._ends.setdefault((self.token_ids[end - 1], self.token_ids[end]), []).append(end)
        self._place = Place(0, 0)
        self._break: tuple[int, int] | None = None
        """The place where the texts parted: position in the prediction, tokens of the text by then."""
        self._tail: list[int] = []
        self._num_seen = 0

    def append(self, token_id: int) -> None:
        """The text's next token. Takes constant time where it is in step."""
        self._tail = [*self._tail[1 - _LONGEST_MATCH :], token_id]
        self._num_seen += 1
        position, run = self._place
        if position < len(self.token_ids) and self.token_ids[position] == token_id:
            self._place = Place(position + 1, run + 1)
            if run + 1 >= _SOLID_RUN:
                self._break = None
            return
        if self._break is None:
            self._break = (position, self._num_seen - 1)
        self._place = next(self._guesses())

    def places(self, count: int) -> list[Place]:
        """Returns up to ``count`` places where the text may stand, likeliest first, with different next
        tokens; none at the end of the prediction."""
        found: dict[int, Place] = {}
        guesses = self._guesses() if self._break is not None else iter(())
        for place in (self._place, *guesses) if count > 1 else (self._place,):
            if place.position < len(self.token_ids):
                found.setdefault(self.token_ids[place.position], place)
                if len(found) == count:
                    break
        return list(found.values())

    def _guesses(self) -> Iterator[Place]:
        """Yields places after a break: longest match first, then the nearest; always at least one."""
        assert self._break is not None
        parted, at = self._break
        expected = parted + self._num_seen - at
        matches = [*self._matches(expected)]
        matches.sort(key=lambda place: (-min(place.run, 4), abs(place.position - expected)))
        yield from matches
        yield Place(expected, 0)  # something of the same length was replaced
        yield Place(parted, 0)  # something was inserted

    def _matches(self, expected: int) -> Iterator[Place]:
        """Yields places that the text's last tokens lead to."""
        last = self._tail[-1]
        low, high = max(0, expected - 1 - _NEARBY), expected + _NEARBY
        for end in range(low, min(high, len(self.token_ids))):
            if self.token_ids[end] == last:
                yield Place(end + 1, self._run_to(end))
        if len(self._tail) > 1:
            ends = self._ends.get((self._tail[-2], last), [])
            middle = bisect_left(ends, expected - 1)
            for end in ends[max(0, middle - _MOST_PER_SIDE) : middle + _MOST_PER_SIDE]:
                if not low <= end < high:
                    yield Place(end + 1, self._run_to(end))

    def _run_to(self, end: int) -> int:
        """Returns how many tokens up to the prediction's ``end`` equal the text's last ones."""
        tail = self._tail
        return num_equal_before(self.token_ids, end + 1, tail, len(tail), len(tail))
