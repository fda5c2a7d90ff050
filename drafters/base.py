"""The drafter protocol: what guesses for a target, and what it is told afterwards.

One drafter object per engine and name holds the states of all its requests, so that drafters with
a model of their own can batch. The engine thread is the only caller. Most drafters never see a
tensor: token ids, options, the verifier's noise and, where they ask for them, the target's top
tokens per verified row. What else a drafter asks of the engine stands in its ``DrafterNeeds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from drafters.tree import DraftTree

OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What one request asked for: ``width`` 1 is a chain; ``depth`` bounds the longest path."""

    width: int = 1
    depth: int = 16


Noise: TypeAlias = Callable[[int, Sequence[int]], Sequence[float]]
"""``noise(position, token_ids)``: Gumbel noise of tokens at an absolute position, one float each."""


def no_noise(position: int, token_ids: Sequence[int]) -> Sequence[float]:
    """Greedy: no token is favoured."""
    del position
    return [0.0] * len(token_ids)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the request's tokens are drawn: ``argmax(logit / temperature + noise)`` among what top-k,
    top-p and min-p keep; ``temperature`` 0 is greedy (then ``noise`` is none).

    Under ``verification`` "match", ``noise`` is the verifier's own, so a drafter that draws with it
    agrees with the target more often than any that draws independently. Under other
    verifications it is a stream of the drafter's own, and a drafter that draws attaches the
    distributions it drew from to the tree (``DraftTree.draft_probs``). ``key`` and ``stream`` are the
    same noise for those who compute it over tensors.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: Noise = no_noise
    key: int = 0
    verification: str = "match"


GREEDY = DraftSampling()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request's turn to draft.

    ``token_ids`` is the request's live list, prompt plus everything emitted (the last one is the
    anchor); read it, never keep or change it. ``max_nodes`` bounds the tree. ``num_computed_tokens``
    tokens have their keys and values in the target's store. ``block_table`` is live too; for drafters
    that need ``draft_slots`` it covers the slots of ``max_nodes`` nodes after the known tokens.
    ``tokens_per_second``: what the engine would write in this step without drafts, all requests
    together, so that a drafter can weigh its time; 0 where the request's policy does not.
    """

    request_id: str
    token_ids: Sequence[int]
    max_nodes: int
    shape: DraftShape
    sampling: DraftSampling = GREEDY
    num_computed_tokens: int = 0
    block_table: Sequence[int] = ()
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What the target said about one request in one step.

    Row 0 is the anchor, row ``i + 1`` is node ``i`` of ``tree`` (the part that was verified; empty
    at gamma 0). ``path`` holds the rows whose token was emitted, starting with row 0; the target's
    token at the last of them is the last of ``emitted_token_ids``, unless the run was trimmed by a
    stop. Where drafts are not verified by match, ``row_token_ids`` is -1 at rows off the path.
    ``top_token_ids[r]`` are the target's likeliest tokens at row ``r``, best first, zero-
    probability ones left out, if the drafter's ``num_top_tokens`` asked for them, and
    ``top_probs[r]`` their probabilities at temperature 1, before any truncation, for drafters
    that need ``top_probs``.
    """

    request_id: str
    token_ids: Sequence[int]
    tree: DraftTree
    row_token_ids: Sequence[int]
    path: Sequence[int]
    emitted_token_ids: Sequence[int]
    top_token_ids: Sequence[Sequence[int]] | None = None
    top_probs: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The target's last hidden states (what its output head reads) of newly committed tokens.

    Row ``i`` belongs to the token at ``first_position + i``. The first call after admission starts
    where the cached prefix ended, one after preemption may start anew at a smaller position.
    """

    request_id: str
    first_position: int
    token_ids: Sequence[int]
    """The request's live list, as in ``Observation``."""
    hidden: Any  # [num_rows, hidden_size], the target's type and device


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter asks of the engine besides token ids.

    ``top_probs``: probabilities beside the top tokens. ``hidden_rows``: the drafter is a
    ``HiddenDrafter``. ``draft_slots``: it writes keys and values, so slots for its nodes are leased
    before it proposes. ``whole_trees``: rows of a draft are of use only together (the Lookahead
    window), so a policy grants a draft whole or not at all.
    """

    top_probs: bool = False
    hidden_rows: bool = False
    draft_slots: bool = False
    whole_trees: bool = False


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """A per-request option of a drafter: checked by the server, listed by ``GET /v1/drafters``."""

    name: str
    default: OptionValue
    description: str
    minimum: float | None = None
    maximum: float | None = None

    def check(self, value: object) -> OptionValue:
        """The value, if it fits. Raises ValueError naming the option otherwise."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.name} must be {kind.__name__}, not {type(value).__name__}")
        assert isinstance(value, bool | int | float | str)
        if not isinstance(value, bool | str):
            if self.minimum is not None and value < self.minimum:
                raise ValueError(f"{self.name} must be at least {self.minimum:g}")
            if self.maximum is not None and value > self.maximum:
                raise ValueError(f"{self.name} must be at most {self.maximum:g}")
        return value


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The public face of a drafter. ``drafts_trees``: has several continuations to offer,
    within the width that a request names."""

    name: str
    description: str
    drafts_trees: bool
    options: tuple[DrafterOption, ...] = ()
    needs: DrafterNeeds = DrafterNeeds()
    cost: str = ""
    """What drafting costs, in words: for those who choose."""
    draws: bool = False
    """Can draw its tokens from a distribution of its own, which other verifications than "match"
    ask for."""
    takes_reference: bool = False
    """The drafter is a ``ReferenceDrafter``."""

    def defaults(self) -> dict[str, OptionValue]:
        return {option.name: option.default for option in self.options}

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        """Defaults overlaid with checked values. Raises ValueError naming the offending option."""
        known = {option.name: option for option in self.options}
        unknown = sorted(set(given) - set(known))
        if unknown:
            have = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; it has: {have}")
        return self.defaults() | {name: known[name].check(value) for name, value in given.items()}


@runtime_checkable
class Drafter(Protocol):
    """A method of guessing. ``open`` .. ``close`` bracket a request's life, preemption included."""

    info: DrafterInfo

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None:
        """Start a request whose known tokens are ``token_ids`` (its prompt).

        ``cache_salt`` names the tenant: nothing learned under one cache_salt may draft under another.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree per request, at most ``max_nodes`` nodes each, possibly empty."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from verified rows. ``token_ids`` already ends with ``emitted_token_ids``."""

    def num_top_tokens(self, request_id: str) -> int:
        """How many of the target's top tokens per row ``observe`` wants for it; 0: none."""

    def close(self, request_id: str) -> None:
        """Forget the request."""


@runtime_checkable
class HiddenDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states."""

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Called after each step, before ``observe``, with every newly committed row of its requests,
        prompt chunks included. The tensors are the drafter's to keep."""


@runtime_checkable
class ReferenceDrafter(Drafter, Protocol):
    """A drafter that can use a text which the output is expected to repeat for the most part."""

    def refer(self, request_id: str, reference_token_ids: Sequence[int]) -> None:
        """Called once, right after ``open``, for a request that comes with such a text."""
