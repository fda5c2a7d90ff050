"""What drafters ask of the models and heads that an engine lends them; ``engine/drafting`` has the real
ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from drafters.base import DraftRequest

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Beam:
    """By what the nodes of a tree are chosen that are followed further, where nobody reads what they are
    before: as ``DraftGrowth`` chooses them. ``counts``: by feature, how many nodes were accepted of how
    many; ``strength``: how many the draft model's own opinion counts for."""

    min_survival: float
    counts: Sequence[tuple[float, float]]
    strength: float


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One request's rows of a draft forward.

    Without ``parents``: ``token_ids`` follow the text from position ``base`` on, in the slots of their
    positions. With ``parents`` (as in ``DraftTree``; ``ROOT`` is the token before ``base``): the
    rows are the last ``len(token_ids)`` nodes of that tree, in the slots from ``base`` on in the
    order of the nodes; the ``num_stored`` nodes before them are in the store already.

    The last ``num_scored`` rows are each asked for ``num_candidates`` tokens that may follow.

    ``picks``: of rows whose tokens nobody has read yet, what they are: which of the request's scored rows
    of the level before, and which of its candidates. ``token_ids`` are stand-ins then. ``fillers``:
    distinct tokens that complete the candidates that are picked, in this order, where the request's
    sampling leaves fewer. ``beam``: the likeliest candidates of the level before are picked, by this;
    ``parents`` then say how deep nodes lie, not what they hang on.
    """

    ask: DraftRequest
    token_ids: Sequence[int]
    base: int
    num_scored: int
    num_candidates: int = 1
    parents: Sequence[int] = ()
    num_stored: int = 0
    picks: Sequence[tuple[int, int]] = ()
    fillers: Sequence[int] = ()
    beam: Beam | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the draft model would let follow one row, in its order of preference.

    ``confidences[i]`` is the share of token i among ``exp(log draft probability + noise)``: with
    greedy drafting its draft probability, with the verifier's noise how clearly it won.

    For requests whose verification is not "match", ``distribution`` is what the tokens were sampled
    from, without replacement: a tensor ``[vocab_size]``. Their confidences are its largest entry,
    whatever was sampled: how far to draft must not depend on a sample that is judged by its
    distribution.
    """

    token_ids: Sequence[int]
    confidences: Sequence[float]
    distribution: Any = None


class Levels(NamedTuple):
    """What forwards one after another said: by level and by request, candidates per scored row.
    ``seconds``: that all levels but the first took. ``picks``: by level and request, for rows with a
    ``beam``, what each holds, best first, as in ``DraftRows``; rows past these hold nothing."""

    candidates: list[list[list[Candidates]]]
    seconds: float
    picks: list[list[list[tuple[int, int]]]]


class Reader(Protocol):
    """What can begin something whose results are read later, once for all that was begun."""

    def read_now(self, begin: Callable[[Any], Callable[[], _Result]]) -> _Result:
        """Begin it with a readback of its own, wait for what it reads, and finish it."""


class DraftModel(Reader, Protocol):
    """A model that drafts for a target, over slots that the target's block tables name.

    ``owns_rows``: it keeps keys and values of its own, so that the drafter has to feed it the text;
    otherwise it reads the target's committed rows, and what it writes is overwritten by verification.
    ``max_catch_up_rows``: the most rows of known text per ``propose``. ``max_len``: positions it has.
    ``runs_ahead``: to read what it chose means to wait, so that levels whose places are known are run
    before; ``picks_ahead``: it can pick rows by a ``Beam``.
    """

    @property
    def owns_rows(self) -> bool: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def max_catch_up_rows(self) -> int: ...
    @property
    def runs_ahead(self) -> bool: ...
    @property
    def picks_ahead(self) -> bool: ...

    def begin(self, levels: Sequence[Sequence[DraftRows]], readback: Any) -> Callable[[], Levels]:
        """Run one level after another, all rows of each at once, and keep their keys and values. What
        they said is there once ``readback`` was fetched."""

    def keep(self, ask: DraftRequest, rows: Sequence[int]) -> None:
        """Of the rows of drafts that a request has in the store, by their order, move these to the first
        slots."""


class FeatureModel(DraftModel, Protocol):
    """A draft model that reads hidden states."""

    def take_hidden(self, request_id: str, first: int, hidden: Any) -> None:
        """The target's states of newly committed tokens from position ``first`` on."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""


class PredictionHeads(Reader, Protocol):
    """Heads over a target's hidden states."""

    @property
    def num_heads(self) -> int: ...

    def begin(
        self,
        hidden: Sequence[Any],  # each [hidden_size]
        asks: Sequence[DraftRequest],
        num: int,
        readback: Any,
    ) -> Callable[[], list[list[Candidates]]]:
        """``[request][head]``: ``num`` tokens each, chosen as the request samples; all requests in one
        batch. The tokens of head 0 would stand right after the request's known tokens. They are there
        once ``readback`` was fetched."""
