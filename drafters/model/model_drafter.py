"""Drafting with a model: a small one, a quantised copy of the target, some of the target's layers.

The engine builds the model (``DraftModel``). Requests are batched over rounds; round d runs only those
that still want depth d, and has to be worth what it takes. A model with rows of its own first reads the
text, in chunks under a budget of rows per step; a request drafts once it has caught up. The last row it
may hold is that of the token before the anchor, so the first round feeds the anchor and whatever else
is missing: tokens that the target added or others drafted, accepted nodes that do not lie in place. A
model on the target's rows misses the anchor alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    RequestState,
    drafter,
)
from drafters.batch_times import BatchTimes, margin_of
from drafters.model.block_contents import BlockContents, TextDigests
from drafters.model.growth import INITIAL_ACCEPTANCE, DraftGrowth, is_first_child
from drafters.model.protocol import DraftModel, DraftRows, Levels
from drafters.tree import EMPTY, FORCED, ROOT, DraftTree, chain_length

_STRENGTH = 8.0
"""The draft model's own opinion counts as so many nodes of a feature."""
_DECAY = 0.995

OPTIONS = (
    DrafterOption(
        "min_confidence",
        0.3,
        "Draft no deeper below a path that is accepted with less than this estimated probability.",
        minimum=0.0,
        maximum=1.0,
    ),
)


@dataclass(slots=True)
class DraftedText(RequestState):
    """A request's options and text."""

    min_confidence: float
    text: TextDigests


@dataclass(frozen=True, slots=True)
class FirstRound:
    """A request that drafts in this step, and the known tokens that its first round feeds."""

    index: int
    ask: DraftRequest
    state: DraftedText
    num_valid: int

    @property
    def lag(self) -> int:
        """Rows of known tokens to feed, the anchor's included."""
        return len(self.ask.token_ids) - self.num_valid


class Calibration:
    """The acceptance of nodes by how sure the draft model was of them: discounted counts of all requests
    over the draft model's own opinion."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}
        self._num_continued = (1.0, 2.0)

    @property
    def mean(self) -> float:
        """How often some child of a node that was reached is accepted."""
        num_continued, num_reached = self._num_continued
        return num_continued / num_reached

    def acceptance(self, feature: int, confidence: float) -> float:
        num_accepted, num_labels = self._counts.get(feature, (0.0, 0.0))
        return (num_accepted + _STRENGTH * confidence) / (num_labels + _STRENGTH)

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """``path``: accepted rows, as in ``Observation``. Nodes whose parent was reached are labelled."""
        reached = {row - 1 for row in path}  # row 0 becomes ROOT
        continued = {tree.parents[node] for node in reached if node != ROOT}
        for node, parent in enumerate(tree.parents):
            if parent not in reached or tree.features[node] == FORCED:
                continue
            feature, accepted = tree.features[node], node in reached
            self._counts[feature] = _counted(self._counts.get(feature, (0.0, 0.0)), accepted)
            if is_first_child(feature):
                self._num_continued = _counted(self._num_continued, parent in continued)


def _counted(counts: tuple[float, float], accepted: bool) -> tuple[float, float]:
    return counts[0] * _DECAY + accepted, counts[1] * _DECAY + 1.0


class ModelDrafter(Drafter):
    """See the module. Nothing learned from one tenant's text reaches another: calibration counts hold
    no tokens, and rows are found by digests that start with the tenant's cache_salt."""

    initial_acceptance = INITIAL_ACCEPTANCE

    def __init__(self, model: DraftModel) -> None:
        super().__init__()
        self._model = model
        self.num_slots = model.num_slots
        if model.runs_ahead:  # which chains alone can
            self.auto_width = 1
        self._contents = BlockContents(model.block_size, model.first_row)
        self._calibration = Calibration()
        self._times = BatchTimes()

    @classmethod
    def build(cls, context: DrafterContext) -> ModelDrafter:
        return cls(context.draft_model(cls.info.name))

    @property
    def kept_rows(self) -> tuple[DraftModel, BlockContents] | None:
        """The model, which keeps rows of its own under the ids of blocks, and the record of them; None:
        it keeps none."""
        return (self._model, self._contents) if self._model.owns_rows else None

    def start(self, request: NewRequest) -> DraftedText:
        text = TextDigests(request.cache_salt, self._model.block_size)
        return DraftedText(float(request.options["min_confidence"]), text)

    def finish(self, request_id: str, state: Any) -> None:  # noqa: ARG002
        self._model.leave(request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return self._model.read_now(partial(self.begin, requests))

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """See ``Drafter``. The first round is begun here, and all rounds of chains that run ahead."""
        trees = [EMPTY] * len(requests)
        asks = enumerate(requests)
        turns = [self._first_round(at, ask) for at, ask in asks if self._has_room(ask)]
        rows = self._deal([turn for turn in turns if self._can_feed(turn)])
        if not rows:
            return lambda: trees
        growths = {turn.index: self._growth(turn) for turn, first in rows if first.num_scored}
        levels = [[first for _, first in rows], *self._chains_ahead(growths.values())]
        for level in levels:
            self._forget(level)
        pending = self._model.begin(levels, readback)

        def finish() -> list[DraftTree]:
            found = pending()
            self._wrote(levels[0])
            for (turn, _), candidates in zip(rows, found.candidates[0], strict=True):
                if turn.index in growths:
                    growths[turn.index].add_first(candidates)
            self._read_ahead(growths.values(), levels, found)
            self._grow_on(growths.values())
            for index, growth in growths.items():
                trees[index] = growth.tree()
            return trees

        return finish

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            self._calibration.learn(seen.tree, seen.path)

    # The first round: known tokens

    def _first_round(self, index: int, ask: DraftRequest) -> FirstRound:
        state, most = self._states[ask.request_id], len(ask.token_ids) - 1
        if not self._model.owns_rows:
            return FirstRound(index, ask, state, min(ask.num_computed_tokens, most))
        state.text.update(ask.token_ids)
        valid = self._contents.num_valid(ask.block_table, state.text, ask.token_ids, most)
        return FirstRound(index, ask, state, self._model.usable_rows(ask, valid))

    def _has_room(self, ask: DraftRequest) -> bool:
        return ask.depth > 0 and len(ask.token_ids) < self._model.max_len

    def _can_feed(self, turn: FirstRound) -> bool:  # noqa: ARG002
        """Whether all that the rows of known tokens read is at hand."""
        return True

    def _deal(self, turns: Sequence[FirstRound]) -> list[tuple[FirstRound, DraftRows]]:
        """Returns rows within the budget, those with the least to catch up first. Requests whose rows
        reach to the anchor have that one scored, and draft.

        Requests that share blocks may lack the same rows: then one of them waits, and finds the rows
        written at its next turn.
        """
        rows: list[tuple[FirstRound, DraftRows]] = []
        claimed: set[int] = set()
        budget, size = self._model.max_catch_up_rows, self._model.block_size
        for turn in sorted(turns, key=lambda turn: (turn.lag, turn.index)):
            ask, first = turn.ask, turn.num_valid
            blocks = set(ask.block_table[first // size : (len(ask.token_ids) - 1) // size + 1])
            count = min(turn.lag, max(budget, 1 if turn.lag == 1 else 0))
            whole = count == turn.lag
            if count < 1 or claimed & blocks or not (whole or self._model.owns_rows):
                continue
            claimed |= blocks
            budget -= count
            tokens = list(ask.token_ids[first : first + count])
            width = min(ask.shape.width, ask.max_nodes)
            rows.append((turn, DraftRows(ask, tokens, first, int(whole), width)))
        return rows

    # Later rounds: drafted tokens

    def _growth(self, turn: FirstRound) -> DraftGrowth:
        ask = turn.ask
        depth = min(ask.shape.depth, self._model.max_len - len(ask.token_ids))
        if self._model.most_depth is not None:
            depth = min(depth, self._model.most_depth)
        if self._model.num_parallel > 1:
            depth = min(depth, 1)  # there is one level, which is all of the draft
        least = max(turn.state.min_confidence, ask.least_survival)
        return DraftGrowth(ask, least, depth, self._calibration.acceptance)

    def _chains_ahead(self, growths: Iterable[DraftGrowth]) -> list[list[DraftRows]]:
        """Returns later rounds of chains, where to read a round means to wait for a device: they are run
        to the full depth, and cut when they are read where the draft model was unsure."""
        chains = [each for each in growths if each.is_chain and self._model.runs_ahead]
        levels: list[list[DraftRows]] = []
        for depth in range(1, max((each.most_levels for each in chains), default=0)):
            ready = [each for each in chains if each.most_levels > depth]
            expected = self._calibration.mean ** (depth + 1)
            gain = sum(max(0.0, expected - each.ask.row_price(depth)) for each in ready)
            if not self._pays(ready, len(ready), gain):
                break
            levels.append([DraftRows(each.ask, [0], each.base + depth - 1, 1) for each in ready])
        return levels

    def _pays(self, growths: Sequence[DraftGrowth], num_rows: int, gain: float) -> bool:
        """Whether a round of these rows, which is expected to bring ``gain`` tokens, brings more than the
        engine writes in the time it takes. Requests that do not weigh costs pay for the others."""
        rates = [growth.ask.tokens_per_second for growth in growths]
        if not min(rates):
            return True
        return gain > margin_of(len(growths)) * max(rates) * self._times.expect(num_rows)

    def _read_ahead(
        self, growths: Iterable[DraftGrowth], levels: Sequence[Sequence[DraftRows]], found: Levels
    ) -> None:
        """Grows chains by the rounds that were run ahead, ``levels`` but the first."""
        growth_of = {growth.ask.request_id: growth for growth in growths}
        for level, candidates in zip(levels[1:], found.candidates[1:], strict=True):
            for run, each in zip(level, candidates, strict=True):
                growth = growth_of[run.ask.request_id]
                nodes = growth.frontier
                if nodes:
                    self._wrote([growth.next_rows()])
                    growth.add_level(nodes, each)
            self._times.observe(len(level), found.seconds / (len(levels) - 1))

    def _grow_on(self, growths: Iterable[DraftGrowth]) -> None:
        """Grows round by round, each by what the one before has found: what was not run ahead."""
        growing = [each for each in growths if not (each.is_chain and self._model.runs_ahead)]
        while ready := [growth for growth in growing if growth.frontier]:
            num_rows = sum(len(growth.frontier) for growth in ready)
            mean = self._calibration.mean
            if not self._pays(ready, num_rows, sum(each.expected_gain(mean) for each in ready)):
                return
            frontiers = [growth.frontier for growth in ready]
            rows = [growth.next_rows() for growth in ready]
            start = time.perf_counter()
            self._forget(rows)
            found = self._model.read_now(partial(self._model.begin, [rows]))
            self._wrote(rows)
            self._times.observe(num_rows, time.perf_counter() - start)
            for growth, nodes, each in zip(ready, frontiers, found.candidates[0], strict=True):
                growth.add_level(nodes, each)

    # What is known of the model's store

    def _forget(self, rows: Sequence[DraftRows]) -> None:
        """These rows are about to be overwritten, and what a first level has behind the anchor."""
        if not self._model.owns_rows:
            return
        for each in rows:
            table, count = each.ask.block_table, len(each.token_ids)
            if each.num_scored and each.base < len(each.ask.token_ids):
                count += self._model.num_slots
            room = len(table) * self._model.block_size - each.first
            self._contents.forget(table, each.first, min(count, room))

    def _wrote(self, rows: Sequence[DraftRows]) -> None:
        """These rows were run, and are known by their tokens."""
        if self._model.owns_rows:
            for each in rows:
                tokens = each.token_ids
                if each.parents:  # only these stand where an accepted text would have them
                    tokens = tokens[: max(0, chain_length(each.parents) - each.num_stored)]
                text = self._states[each.ask.request_id].text
                self._contents.write(each.ask.block_table, text, each.first, tokens)


@drafter
class SmallModelDrafter(ModelDrafter):
    info = DrafterInfo(
        "small_model",
        "A small model with the target's tokenizer guesses what the target will write.",
        options=OPTIONS,
        needs=DrafterNeeds(draft_slots=True, draft_model="draft"),
        cost="One forward of the small model per depth, and KV memory for it beside the target's.",
        samples=True,
    )


@drafter
class QuantizedDrafter(ModelDrafter):
    info = DrafterInfo(
        "quantized",
        "A copy with 8-bit or 4-bit weights guesses for the model that it was made from.",
        options=OPTIONS,
        needs=DrafterNeeds(draft_slots=True, draft_model="quantized"),
        cost="One forward of the copy per depth, and memory for its weights.",
        samples=True,
    )


@drafter
class PrefixLayersDrafter(ModelDrafter):
    info = DrafterInfo(
        "prefix_layers",
        "Some of the target's own layers guess for all of them.",
        options=OPTIONS,
        needs=DrafterNeeds(draft_slots=True, draft_model="layers"),
        cost="One forward of these layers per depth; no memory.",
        samples=True,
    )
