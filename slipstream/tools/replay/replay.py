"""Replays logged texts through drafters, without a model: what would drafting have gained?

Under sample-and-match a draft is accepted if and only if it equals the token that the target writes
there, whatever is drafted. So a text that was written once says what any drafter would have had
accepted on it; only times are estimates, from a table of step costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterNeeds,
    DrafterUnavailableError,
    DraftRequest,
    DraftShape,
    Observation,
)
from drafters.registry import build_drafters, drafter_names, find_plugins
from drafters.tree import DraftTree
from slipstream.tools.replay.cost import StepCost
from slipstream.tools.replay.log import LogLine

CHAIN = "chain"
TREE = "tree"


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """A drafter under a budget. ``num_nodes`` bounds each step's draft, in nodes and in depth;
    ``width`` 1 is a chain."""

    drafter: str
    width: int
    num_nodes: int

    @property
    def shape(self) -> str:
        return CHAIN if self.width == 1 else TREE


@dataclass(slots=True)
class ReplayResult:
    """A case's results, summed over the log. Seconds are the drafter's own, per step: proposing and
    observing, without the text's first indexing (``open_seconds``, per request)."""

    case: ReplayCase
    step_seconds_alone: float
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    estimated_seconds: float = 0.0
    draft_seconds: list[float] = field(default_factory=list)
    open_seconds: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.draft_seconds)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None where nothing was drafted."""
        if self.num_draft_tokens == 0:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def wasted_rows_per_step(self) -> float:
        return (self.num_draft_tokens - self.num_accepted_tokens) / self.num_steps

    @property
    def median_draft_seconds(self) -> float:
        return median(self.draft_seconds)

    @property
    def mean_draft_seconds(self) -> float:
        return sum(self.draft_seconds) / self.num_steps

    @property
    def estimated_speedup(self) -> float:
        """Seconds of as many steps of one row as there are tokens / seconds of the steps, drafting
        included."""
        return self.num_tokens * self.step_seconds_alone / self.estimated_seconds


def build_replayable(name: str, context: DrafterContext | None = None) -> Drafter:
    """A fresh drafter, of the core or of a plugin. Raises ValueError for an unknown name, and
    DrafterUnavailableError, with the reason, for one that a log is not enough for."""
    plugins = {} if name in drafter_names() else find_plugins()
    drafter = build_drafters([name], context, plugins)[name]
    reason = _not_replayable(drafter.info.needs)
    if reason is not None:
        raise DrafterUnavailableError(f"drafter {name!r} cannot be replayed: {reason}")
    return drafter


def _not_replayable(needs: DrafterNeeds) -> str | None:
    if needs.hidden_rows:
        return "it needs the target's hidden states"
    if needs.draft_slots:
        return "it needs a model's keys and values"
    if needs.all_or_nothing:
        return "it learns from the target's answers to tokens that were not written"
    return None


def replay(
    case: ReplayCase,
    lines: Sequence[LogLine],
    step_cost: StepCost,
    isolate: bool = False,
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = perf_counter,
    build: Callable[[str], Drafter] = build_replayable,
) -> ReplayResult:
    """Replay all lines in order; one request is open at a time.

    What a drafter learns from finished requests serves later ones of the same cache_salt, as when
    serving; ``isolate`` starts every line with a fresh drafter. ``advance`` is called after each.
    ``build`` makes a case's drafter of its name.
    """
    result = ReplayResult(case, step_cost.seconds(1))
    drafter = build(case.drafter)
    for line in lines:
        if isolate:
            drafter = build(case.drafter)
        _Replay(case, drafter, line, step_cost, result, clock).run()
        advance()
    return result


class _Replay:
    """One line's verify loop."""

    def __init__(
        self,
        case: ReplayCase,
        drafter: Drafter,
        line: LogLine,
        step_cost: StepCost,
        result: ReplayResult,
        clock: Callable[[], float],
    ) -> None:
        self._request_id = f"line {line.number}"
        self._case = case
        self._drafter = drafter
        self._line = line
        self._token_ids = list(line.prompt_token_ids)
        self._text = [*line.prompt_token_ids, *line.completion_token_ids]
        self._step_cost = step_cost
        self._result = result
        self._clock = clock

    def run(self) -> None:
        drafter, token_ids = self._drafter, self._token_ids
        start = self._clock()
        drafter.open(self._request_id, token_ids, {}, self._line.cache_salt)
        self._result.open_seconds.append(self._clock() - start)
        try:
            while len(token_ids) < len(self._text):
                self._step()
        finally:
            drafter.close(self._request_id)

    def _step(self) -> None:
        case, token_ids, result = self._case, self._token_ids, self._result
        # The target adds a token itself: more drafts than the rest less one can never count.
        num_nodes = min(case.num_nodes, len(self._text) - len(token_ids) - 1)
        shape = DraftShape(case.width, case.num_nodes)
        start = self._clock()
        (tree,) = self._drafter.propose(
            [DraftRequest(self._request_id, token_ids, num_nodes, shape)]
        )
        seconds = self._clock() - start
        anchor = token_ids[-1]
        path = accepted_path(tree, self._text, len(token_ids))
        emitted = self._text[len(token_ids) : len(token_ids) + len(path)]
        token_ids += emitted
        observation = self._observation(tree, anchor, path, emitted)
        start = self._clock()
        self._drafter.observe([observation])
        seconds += self._clock() - start
        result.draft_seconds.append(seconds)
        result.num_tokens += len(emitted)
        result.num_draft_tokens += len(tree)
        result.num_accepted_tokens += len(path) - 1
        result.estimated_seconds += seconds + self._step_cost.seconds(1 + len(tree))

    def _observation(
        self, tree: DraftTree, anchor: int, path: list[int], emitted: list[int]
    ) -> Observation:
        """As the engine's, as far as a log knows: of the target's top tokens, the one written, at
        the rows on the path; elsewhere nothing."""
        top_token_ids: list[list[int]] | None = None
        top_probs: list[list[float]] | None = None
        if self._drafter.num_top_tokens(self._request_id):
            known = dict(zip(path, emitted, strict=True))
            rows = range(len(tree) + 1)
            top_token_ids = [[known[row]] if row in known else [] for row in rows]
            top_probs = [[1.0] if row in known else [] for row in rows]
        return Observation(
            self._request_id,
            self._token_ids,
            tree,
            [anchor, *tree.token_ids],
            path,
            emitted,
            top_token_ids,
            top_probs,
        )


def accepted_path(tree: DraftTree, text: Sequence[int], start: int) -> list[int]:
    """Rows (0 is the anchor) along which the tree agrees with ``text[start:]``; the token after the
    last of them is the target's own, so at most all but one of what is left is accepted."""
    return [0, *(node + 1 for node in tree.follow(text[start:-1]))]
