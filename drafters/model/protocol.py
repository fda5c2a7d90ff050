"""The models and heads that an engine lends to drafters; ``engine/drafting`` implements them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from drafters.base import DraftRequest, HiddenRows

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One request's rows of a draft forward.

    Without ``parents``: ``token_ids`` follow the text from position ``base`` on, in the slots of their
    positions. With ``parents`` (as in ``DraftTree``; ``ROOT`` is the token before ``base``): the
    rows are the last ``len(token_ids)`` nodes of that tree, in the slots from ``base`` on in the
    order of the nodes; the ``num_stored`` nodes before them are in the store already.

    The last ``num_scored`` rows are each asked for ``num_candidates`` tokens that may follow.
    """

    ask: DraftRequest
    token_ids: Sequence[int]
    base: int
    num_scored: int
    num_candidates: int = 1
    parents: Sequence[int] = ()
    num_stored: int = 0

    @property
    def first(self) -> int:
        """The position whose slot the first of these rows takes."""
        return self.base + self.num_stored


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that the draft model would let follow one row, best first.

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
    """The results of forwards that ran one after another. ``candidates``: by level, request and scored
    row. ``seconds``: the time that all levels but the first took."""

    candidates: list[list[list[Candidates]]]
    seconds: float


class Reader(Protocol):
    """Something on a device whose results the host reads later, once for all that was begun."""

    def read_now(self, begin: Callable[[Any], Callable[[], _Result]]) -> _Result:
        """Begin with a readback of its own, fetch it, and return the results."""


class DraftModel(Reader, Protocol):
    """A model that drafts for a target, over slots that the target's block tables name.

    ``owns_rows``: it keeps keys and values of its own, so that the drafter has to feed it the text;
    otherwise it reads the target's committed rows, and what it writes is overwritten by verification.
    ``max_catch_up_rows``: the most rows of known text per ``propose``. ``max_len``: positions it has.
    ``runs_ahead``: the host has to wait to read what was chosen, so chains run all levels before.
    ``first_row``: the first token of a text that has a row, 0 or 1. ``keeps_anchor``: the anchor's row is
    the text's; otherwise it is of use to one draft alone, and rows count as written up to the token
    before. ``num_parallel``: the tokens that the first level drafts: with more than one it has as many
    scored rows for each request that drafts, one for each position behind the anchor, and there is
    no other level. ``most_depth``: how deep it can draft; None: as deep as is asked. ``num_slots``: the
    slots behind the anchor that a first level wants whatever it is to draft.
    """

    owns_rows: bool
    first_row: int
    keeps_anchor: bool
    num_parallel: int
    most_depth: int | None
    num_slots: int
    block_size: int
    max_len: int
    max_catch_up_rows: int

    @property
    def runs_ahead(self) -> bool: ...

    def usable_rows(self, ask: DraftRequest, num_valid: int) -> int:
        """Returns how many of a request's first ``num_valid`` tokens, whose rows are in the store, a row
        may follow: fewer where layers keep a state that has not come so far."""

    def leave(self, request_id: str) -> None:
        """The request is over."""

    def begin(self, levels: Sequence[Sequence[DraftRows]], readback: Any) -> Callable[[], Levels]:
        """Run one level after another, all rows of each at once, and keep their keys and values.

        The levels after the first have one row per request. Its token is the first candidate of the
        request's scored row in the level above, whatever ``token_ids`` holds in its place. What is
        returned gives the results once ``readback`` was fetched.
        """


class FeatureModel(DraftModel, Protocol):
    """A draft model that reads hidden states. With ``keeps_anchor`` a token's row reads the state of the
    token before, since its own is not known while it is the anchor; otherwise its own.
    ``hidden_layers``: the layers whose states it reads."""

    hidden_layers: tuple[int, ...]

    def take_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Takes the target's states of newly committed tokens. With ``keeps_anchor`` those of the last
        tokens of blocks are kept under the blocks' ids, too: what follows a cached prefix reads them."""

    def known(self, request_id: str) -> range:
        """Returns the positions of the states that are kept for a request, without a gap."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""


class PredictionHeads(Reader, Protocol):
    """Heads over a target's hidden states."""

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
