"""Drafting with a model: a small one, a quantised copy of the target, some of the target's layers.

The three differ in how the draft model is built, which is the engine's work, and in whose rows they
read; see ``DraftModel``. Here is what they share: requests are batched over rounds, round d runs only
those that still want depth d, and a round has to be worth what it takes.

A model with rows of its own has to read the text first, one row per token, in chunks under a budget of
rows per step; a request drafts once it has caught up. The last row it may hold is that of the token
before the anchor, so the first round feeds at least the anchor, and whatever else is missing: tokens
that the target added, tokens emitted while others drafted for the request, accepted nodes that do not
lie in place. A model on the target's rows misses the anchor alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    drafter,
)
from drafters.model.ahead import Ahead, Planned, Reader, plan_ahead
from drafters.model.block_contents import BlockContents, TextDigests
from drafters.model.growth import NUM_LEVELS, NUM_RANKS, STRENGTH, DraftGrowth, is_first_child
from drafters.model.protocol import Candidates, DraftModel, DraftRows, Levels
from drafters.tree import EMPTY, FORCED, DraftTree, chain_length

_Growth = TypeVar("_Growth", DraftGrowth, Planned)

_EMA = 0.1
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
class _State:
    """A request's options and text."""

    min_confidence: float
    text: TextDigests


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request that drafts in this step, and the known tokens that its first round feeds."""

    index: int
    ask: DraftRequest
    state: _State
    num_valid: int

    @property
    def lag(self) -> int:
        """Rows of known tokens to feed, the anchor's included."""
        return len(self.ask.token_ids) - self.num_valid


class Calibration:
    """How often nodes that the draft model was so sure of were accepted; counts of all requests,
    discounted, over the draft model's own opinion."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}
        self._num_first = (1.0, 2.0)

    @property
    def mean(self) -> float:
        """Of the likeliest child of a node that was reached."""
        num_accepted, num_labels = self._num_first
        return num_accepted / num_labels

    def acceptance(self, feature: int, confidence: float) -> float:
        num_accepted, num_labels = self._counts.get(feature, (0.0, 0.0))
        return (num_accepted + STRENGTH * confidence) / (num_labels + STRENGTH)

    def counts(self) -> list[tuple[float, float]]:
        """Accepted and labelled nodes of each feature but those of sampled trees."""
        none = (0.0, 0.0)
        return [self._counts.get(feature, none) for feature in range(NUM_LEVELS * NUM_RANKS)]

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """``path``: accepted rows, as in ``Observation``. Nodes whose parent was reached are labelled."""
        reached = {row - 1 for row in path}  # row 0 becomes ROOT
        for node, parent in enumerate(tree.parents):
            if parent not in reached or tree.features[node] == FORCED:
                continue
            feature, accepted = tree.features[node], node in reached
            self._counts[feature] = _counted(self._counts.get(feature, (0.0, 0.0)), accepted)
            if is_first_child(feature):
                self._num_first = _counted(self._num_first, accepted)


def _counted(counts: tuple[float, float], accepted: bool) -> tuple[float, float]:
    return counts[0] * _DECAY + accepted, counts[1] * _DECAY + 1.0


class RoundTimes:
    """Seconds of a round by its number of rows, rounded up to a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        key = num_rows.bit_length()
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _EMA * (min(seconds, 4 * known) - known)

    def expect(self, num_rows: int) -> float:
        """0 while no round of about that size has been timed."""
        return self._seconds.get(num_rows.bit_length(), 0.0)


class ModelDrafter(Drafter):
    """See the module. Nothing learned from one tenant's text reaches another: calibration counts hold
    no tokens, and rows are found by digests that start with the tenant's cache_salt."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__()
        self._model = model
        self._contents = BlockContents(model.block_size)
        self._calibration = Calibration()
        self._times = RoundTimes()

    @classmethod
    def build(cls, context: DrafterContext, settings: Any) -> ModelDrafter:  # noqa: ARG003
        return cls(context.draft_model(cls.info.name))

    def start(self, request: NewRequest) -> _State:
        text = TextDigests(request.cache_salt, self._model.block_size)
        return _State(float(request.options["min_confidence"]), text)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return self._model.read_now(partial(self.begin, requests))

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """See ``Drafter``: rounds that can be run ahead of what is read, the first of all among them."""
        trees = [EMPTY] * len(requests)
        turns = [self._turn(index, ask) for index, ask in enumerate(requests)]
        rows, drafting = self._deal([turn for turn in turns if self._has_room(turn.ask)])
        if not rows:
            return lambda: trees
        growing = {
            turn.index: Reader(self._growth(turn)) for turn, _ in rows if turn.index in drafting
        }
        ahead = self._ahead([each.growth for each in growing.values()])
        levels = [ahead.first([part for _, part in rows]), *ahead.levels]
        for level in levels:
            self._forget(level)
        pending = self._model.begin(levels, readback)

        def finish() -> list[DraftTree]:
            found = pending()
            self._wrote(levels[0])
            for (turn, _), candidates in zip(rows, found.candidates[0], strict=True):
                if turn.index in drafting:
                    growing[turn.index].start(candidates)
            self._grow_along(list(growing.values()), ahead, found)
            self._grow_on([each.growth for each in growing.values()], ahead)
            for index, each in growing.items():
                trees[index] = each.growth.tree()
            return trees

        return finish

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            self._calibration.learn(seen.tree, seen.path)

    # The first round: known tokens

    def _turn(self, index: int, ask: DraftRequest) -> _Turn:
        state = self._states[ask.request_id]
        if not self._model.owns_rows:
            return _Turn(index, ask, state, min(ask.num_computed_tokens, len(ask.token_ids) - 1))
        state.text.update(ask.token_ids)
        most = len(ask.token_ids) - 1
        valid = self._contents.num_valid(ask.block_table, state.text, ask.token_ids, most)
        return _Turn(index, ask, state, valid)

    def _has_room(self, ask: DraftRequest) -> bool:
        return (
            ask.max_nodes > 0 and ask.shape.depth > 0 and len(ask.token_ids) < self._model.max_len
        )

    def _deal(self, turns: Sequence[_Turn]) -> tuple[list[tuple[_Turn, DraftRows]], set[int]]:
        """Rows within the budget, those with the least to catch up first, and who drafts.

        Requests that share blocks may lack the same rows: then one of them waits, and finds the rows
        written at its next turn.
        """
        rows: list[tuple[_Turn, DraftRows]] = []
        drafting: set[int] = set()
        claimed: set[int] = set()
        budget = self._model.max_catch_up_rows
        for turn in sorted(turns, key=lambda turn: (turn.lag, turn.index)):
            blocks = self._blocks_of(turn)
            count = min(turn.lag, max(budget, 1 if turn.lag == 1 else 0))
            whole = count == turn.lag
            if count < 1 or claimed & blocks or not (whole or self._model.owns_rows):
                continue
            claimed |= blocks
            budget -= count
            rows.append((turn, self._known_rows(turn, count, whole)))
            if whole:
                drafting.add(turn.index)
        return rows, drafting

    def _blocks_of(self, turn: _Turn) -> set[int]:
        size = self._model.block_size
        last = len(turn.ask.token_ids) - 1
        return set(turn.ask.block_table[turn.num_valid // size : last // size + 1])

    def _known_rows(self, turn: _Turn, count: int, whole: bool) -> DraftRows:
        ask, first = turn.ask, turn.num_valid
        tokens = list(ask.token_ids[first : first + count])
        width = min(ask.shape.width, ask.max_nodes)
        return DraftRows(ask, tokens, first, int(whole), width)

    # Later rounds: drafted tokens

    def _growth(self, turn: _Turn) -> DraftGrowth:
        ask = turn.ask
        depth = min(ask.shape.depth, self._model.max_len - len(ask.token_ids))
        return DraftGrowth(ask, turn.state.min_confidence, depth, self._calibration.acceptance)

    def _ahead(self, growing: Iterable[DraftGrowth]) -> Ahead:
        """The rounds that are run before the first one's candidates are read."""
        if not self._model.runs_ahead:
            return Ahead({}, [])
        counts = self._calibration.counts() if self._model.picks_ahead else None
        return plan_ahead(growing, self._calibration.mean, counts, self._worth_a_round)

    def _worth_a_round(self, growing: Iterable[_Growth]) -> list[_Growth]:
        """Who runs another round: all that can, if it is expected to bring more tokens than the engine
        writes in the time it takes. Requests that do not weigh costs pay for the others."""
        ready = [growth for growth in growing if growth.frontier]
        rates = [growth.ask.tokens_per_second for growth in ready]
        if not ready or not min(rates):
            return ready
        num_rows = sum(len(growth.frontier) for growth in ready)
        price = max(rates) * self._times.expect(num_rows)
        gain = self._calibration.mean * sum(growth.expected_gain for growth in ready)
        return ready if gain > price else []

    def _grow_along(self, growing: Sequence[Reader], ahead: Ahead, found: Levels) -> None:
        """By what the rounds that were run ahead have found."""
        for number, level in enumerate(ahead.levels):
            read = ahead.read(number, found)
            for each in growing:
                mine = read.get(each.growth.ask.request_id)
                rows = None if mine is None else each.read(mine)
                if rows is not None:
                    self._wrote([rows])
            num_rows = sum(len(planned.token_ids) for planned in level)
            self._times.observe(num_rows, found.seconds / len(ahead.levels))
        for each in growing:
            if each.has_gaps:
                self._model.keep(each.growth.ask, each.kept)

    def _grow_on(self, growing: Sequence[DraftGrowth], ahead: Ahead) -> None:
        """Round by round, each by what the one before has found: all that could not be planned."""
        growing = [each for each in growing if not ahead.is_final(each)]
        while ready := self._worth_a_round(growing):
            frontiers = [growth.frontier for growth in ready]
            rows = [growth.next_rows() for growth in ready]
            start = time.perf_counter()
            candidates = self._run(rows)
            num_rows = sum(len(each.token_ids) for each in rows)
            self._times.observe(num_rows, time.perf_counter() - start)
            for growth, nodes, found in zip(ready, frontiers, candidates, strict=True):
                growth.add_level(nodes, found)

    # The model, and what is known of its store

    def _run(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        self._forget(rows)
        found = self._model.read_now(partial(self._model.begin, [rows]))
        self._wrote(rows)
        return found.candidates[0]

    def _forget(self, rows: Sequence[DraftRows]) -> None:
        """These rows are about to be overwritten."""
        if self._model.owns_rows:
            for each in rows:
                first = each.base + each.num_stored
                self._contents.forget(each.ask.block_table, first, len(each.token_ids))

    def _wrote(self, rows: Sequence[DraftRows]) -> None:
        """These rows were run, and are known by their tokens."""
        if self._model.owns_rows:
            for each in rows:
                root = self._states[each.ask.request_id].text.root
                tokens = each.token_ids[: _num_in_place(each)]
                first = each.base + each.num_stored
                self._contents.write(each.ask.block_table, root, first, tokens)


def _num_in_place(rows: DraftRows) -> int:
    """How many of the rows stand where an accepted text would have them."""
    if not rows.parents:
        return len(rows.token_ids)
    return max(0, chain_length(rows.parents) - rows.num_stored)


@drafter(
    "small_model",
    "A small model with the target's tokenizer guesses what the target will write.",
    options=OPTIONS,
    needs=DrafterNeeds(draft_slots=True, draft_model="small"),
    cost="One forward of the small model per depth, and KV memory for it beside the target's.",
    samples=True,
)
class SmallModelDrafter(ModelDrafter):
    """See the module."""


@drafter(
    "quantized",
    "A copy with 8-bit or 4-bit weights guesses for the model that it was made from.",
    options=OPTIONS,
    needs=DrafterNeeds(draft_slots=True, draft_model="quantized"),
    cost="One forward of the copy per depth, and memory for its weights.",
    samples=True,
)
class QuantizedDrafter(ModelDrafter):
    """See the module."""


@drafter(
    "prefix_layers",
    "Some of the target's own layers guess for all of them.",
    options=OPTIONS,
    needs=DrafterNeeds(draft_slots=True, draft_model="layers"),
    cost="One forward of these layers per depth; no memory.",
    samples=True,
)
class PrefixLayersDrafter(ModelDrafter):
    """See the module."""
