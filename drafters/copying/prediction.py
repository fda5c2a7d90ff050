"""``prediction``: the client says what the output will mostly be (OpenAI's Predicted Outputs).

The prediction is drafted along; where the output parts from it, the place is found again (see
``drafters.copying.reference``). Trees follow several places at once while it is not certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafters.base import DrafterInfo, DraftRequest, Observation, OptionValue
from drafters.copying.reference import Place, ReferenceAligner
from drafters.per_request import PerRequestDrafter
from drafters.tree import EMPTY, ROOT, DraftTree
from drafters.trie import Trie

_BUCKET_STARTS = (0, 1, 2, 3, 5, 9, 17, 33)
_NUM_RANKS = 4
_OTHERS_DEPTH = 3

INFO = DrafterInfo(
    name="prediction",
    description=(
        "Follows the request's `prediction`, the text its output is expected to repeat for the most "
        "part, and finds its place again after every change."
    ),
    drafts_trees=True,
    cost="Microseconds of CPU time; no model.",
    takes_reference=True,
)


def run_feature(run: int, rank: int) -> int:
    """Bucket of (equal tokens before the node, rank of its place): 0..31."""
    bucket = sum(run >= start for start in _BUCKET_STARTS) - 1
    return bucket * _NUM_RANKS + min(rank, _NUM_RANKS - 1)


class PredictionDrafter(PerRequestDrafter):
    """See the module. Without a prediction a request is never drafted for."""

    def __init__(self) -> None:
        super().__init__(INFO, PredictionState)

    def refer(self, request_id: str, reference_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        state = self._states[request_id]
        assert isinstance(state, PredictionState)
        state.refer(reference_token_ids)


class PredictionState:
    """One request. ``num_seen``: tokens of its text that the aligner has been told of."""

    num_top_tokens = 0

    def __init__(self, token_ids: Sequence[int], options: Mapping[str, OptionValue]) -> None:
        del options
        self._num_seen = len(token_ids)
        self._aligner: ReferenceAligner | None = None

    def refer(self, reference_token_ids: Sequence[int]) -> None:
        self._aligner = ReferenceAligner(reference_token_ids)

    def observe(self, observation: Observation) -> None:
        self._catch_up(observation.token_ids)

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        if self._aligner is not None:
            for token_id in token_ids[self._num_seen :]:
                self._aligner.append(token_id)
        self._num_seen = len(token_ids)

    def propose(self, request: DraftRequest) -> DraftTree:
        self._catch_up(request.token_ids)
        aligner, width = self._aligner, request.shape.width
        if aligner is None or request.max_nodes < 1 or request.shape.depth < 1:
            return EMPTY
        places = aligner.places(width)
        if not places:
            return EMPTY
        builder = Trie(request.max_nodes, request.shape.depth)
        for rank, (place, num_nodes) in enumerate(
            zip(places, _shares(places, request), strict=True)
        ):
            _add_run(builder, aligner, place, rank, num_nodes)
        return builder.build()


def _shares(places: Sequence[Place], request: DraftRequest) -> list[int]:
    """Nodes for each place: alike while nothing speaks for one of them, else most for the first and
    enough for the others to find out."""
    num_places = len(places)
    others = request.max_nodes // num_places
    if places[0].run > 0:
        others = min(_OTHERS_DEPTH, others)
    first = request.max_nodes - others * (num_places - 1)
    return [min(share, request.shape.depth) for share in (first, *[others] * (num_places - 1))]


def _add_run(
    builder: Trie, aligner: ReferenceAligner, place: Place, rank: int, num_nodes: int
) -> None:
    parent: int | None = ROOT
    coming = aligner.token_ids[place.position : place.position + num_nodes]
    for offset, token_id in enumerate(coming):
        parent = builder.add(parent, token_id, run_feature(place.run + offset, rank))
