"""A world for drafters with a model: a draft model without a network whose store remembers, per slot, the
whole text that its row had seen, and an engine's bookkeeping around it, over the real block pool.

A row that attends to anything but its own text's rows fails the test at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from drafters.base import DraftRequest, DraftSampling, DraftShape, Observation, OptionValue
from drafters.model.model_drafter import SmallModelDrafter
from drafters.model.protocol import Candidates, DraftRows, Levels
from drafters.tree import ROOT, DraftTree
from engine.batch import slot_of
from kvpool.block_pool import BlockPool
from worlds.simulated_target import verify_step

BLOCK_SIZE = 4
VOCAB_SIZE = 11
Text = tuple[int, ...]


def ranking(text: Sequence[int]) -> list[int]:
    """The fake draft model's tokens after a text, best first; it looks at the last three."""
    mixed = hash(tuple(text[-3:])) % 7919
    first = mixed % VOCAB_SIZE
    return [(first + step) % VOCAB_SIZE for step in range(VOCAB_SIZE)]


def target(text: Sequence[int]) -> int:
    """Mostly the draft model's first, at times its second, at times none of its best."""
    place = (0, 0, 0, 0, 1, 5, 0, 2)[hash(tuple(text[-5:])) % 8]
    return ranking(text)[place]


class Forwards:
    """The methods of a draft model that follow from its ``forward`` of one level, which takes half a
    second."""

    runs_ahead = False
    first_row = 0
    keeps_anchor = True
    num_parallel = 1
    most_depth = None
    num_slots = 0

    def read_now(self, begin: Callable[[Any], Callable[[], Any]]) -> Any:
        return begin(None)()

    def usable_rows(self, ask: DraftRequest, num_valid: int) -> int:  # noqa: ARG002
        return num_valid

    def leave(self, request_id: str) -> None:
        """Nothing is kept of requests."""

    def begin(self, levels: Sequence[Sequence[DraftRows]], readback: Any) -> Callable[[], Levels]:
        del readback
        found = [self.forward(levels[0])]
        for above, rows in pairwise(levels):
            scored = zip(above, found[-1], strict=True)
            chosen = {each.ask.request_id: one[0].token_ids[0] for each, one in scored if one}
            found.append(
                self.forward([replace(r, token_ids=[chosen[r.ask.request_id]]) for r in rows])
            )
        return lambda: Levels(found, 0.5 * (len(found) - 1))

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        """Runs all rows at once; returns, per request, the candidates of each scored row."""
        raise NotImplementedError


class FakeDraftModel(Forwards):
    """See ``drafters.model.protocol.DraftModel``. ``rows[slot]`` is the text up to and with its token."""

    def __init__(
        self,
        owns_rows: bool = True,
        max_catch_up_rows: int = 64,
        max_len: int = 500,
        confidences: Sequence[float] = (0.8, 0.1, 0.05),
        runs_ahead: bool = False,
    ) -> None:
        self.runs_ahead = runs_ahead
        self.owns_rows = owns_rows
        self.block_size = BLOCK_SIZE
        self.max_len = max_len
        self.max_catch_up_rows = max_catch_up_rows
        self.confidences = confidences
        self.rows: dict[int, Text] = {}
        self.calls: list[list[DraftRows]] = []
        self.fails = False

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        self.calls.append(list(rows))
        if self.fails:
            raise RuntimeError("the model was told to fail")
        written: set[int] = set()
        return [self._run(each, written) for each in rows]

    def _run(self, rows: DraftRows, written: set[int]) -> list[Candidates]:
        texts = self._tree(rows, written) if rows.parents else self._chain(rows, written)
        scored = texts[len(texts) - rows.num_scored :]
        return [self._candidates(text, rows) for text in scored]

    def _candidates(self, text: Text, rows: DraftRows) -> Candidates:
        count = min(rows.num_candidates, len(self.confidences))
        distribution = None
        if rows.ask.sampling.verification != "match":
            distribution = ("distribution after", text)
        return Candidates(ranking(text)[:count], self.confidences[:count], distribution)

    def _chain(self, rows: DraftRows, written: set[int]) -> list[Text]:
        text = self._read(rows, rows.base)
        texts = []
        for position, token_id in enumerate(rows.token_ids, rows.base):
            text = (*text, token_id)
            self._write(rows, position, text, written)
            texts.append(text)
        return texts

    def _tree(self, rows: DraftRows, written: set[int]) -> list[Text]:
        root = self._read(rows, rows.base)
        assert root == tuple(rows.ask.token_ids), "a tree hangs on something else than the anchor"
        seen: list[Text] = []
        for node, parent in enumerate(rows.parents):
            above = root if parent == ROOT else seen[parent]
            position = rows.base + node
            if node < rows.num_stored:
                text = self.rows[self._slot(rows, position)]
                assert text[:-1] == above, "a stored node hangs elsewhere"
            else:
                text = (*above, rows.token_ids[node - rows.num_stored])
                self._write(rows, position, text, written)
            seen.append(text)
        return seen[rows.num_stored :]

    def _read(self, rows: DraftRows, base: int) -> Text:
        """The text of the rows before ``base``, each of which has to have seen the ones before it."""
        known = rows.ask.token_ids
        text: Text = tuple(known[: self.first_row])
        for position in range(self.first_row, base):
            held = self.rows.get(self._slot(rows, position))
            assert held is not None, f"row {position} was never written"
            assert held[:-1] == text, f"row {position} saw another text"
            text = held
        assert text[: len(known)] == tuple(known[:base]), "these rows are another text's"
        return text

    def _write(self, rows: DraftRows, position: int, text: Text, written: set[int]) -> None:
        slot = self._slot(rows, position)
        assert slot not in written, "two rows of a forward share a slot"
        written.add(slot)
        self.rows[slot] = text

    def _slot(self, rows: DraftRows, position: int) -> int:
        return slot_of(rows.ask.block_table, position, self.block_size)


@dataclass
class Running:
    """A request; ``drafts`` False: it uses no drafter, and its blocks hold no draft rows."""

    token_ids: list[int]
    shape: DraftShape
    max_nodes: int
    drafts: bool
    cache_salt: str = ""
    num_computed_tokens: int = 0
    is_placed: bool = False
    trees: list[DraftTree] = field(default_factory=list)
    num_accepted: int = 0
    num_steps: int = 0


class World:
    """Requests over a pool, stepped by hand."""

    def __init__(
        self, model: FakeDraftModel, num_blocks: int = 40, sampling: DraftSampling | None = None
    ) -> None:
        self.model = model
        self.drafter = SmallModelDrafter(model)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.requests: dict[str, Running] = {}
        self.sampling = sampling or DraftSampling()
        self.tokens_per_second = 0.0
        self.row_prices: Sequence[float] = ()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        width: int = 1,
        depth: int = 16,
        max_nodes: int = 6,
        drafts: bool = True,
        cache_salt: str = "",
        options: Mapping[str, OptionValue] | None = None,
    ) -> Running:
        request = Running(list(prompt), DraftShape(width, depth), max_nodes, drafts, cache_salt)
        self.requests[name] = request
        if drafts:
            self.drafter.open(name, request.token_ids, options or {}, cache_salt)
        return request

    def remove(self, name: str) -> None:
        self.preempt(name)
        if self.requests.pop(name).drafts:
            self.drafter.close(name)

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        if request.is_placed:
            self.pool.free(name)
            request.is_placed, request.num_computed_tokens = False, 0

    def step(self, names: Sequence[str] | None = None, speculate: bool = True) -> None:
        """One step of these requests; without ``speculate`` nobody drafts (gamma 0)."""
        stepping = [
            name for name in (self.requests if names is None else names) if self._place(name)
        ]
        asking = [name for name in stepping if self.requests[name].drafts and speculate]
        asks = [self._ask(name) for name in asking]
        trees = dict(zip(asking, self.drafter.propose(asks) if asks else [], strict=True))
        for name, ask in zip(asking, asks, strict=True):
            trees[name].validate()
            assert len(trees[name]) <= ask.max_nodes
            assert max(trees[name].depths(), default=0) <= ask.shape.depth
        observations = [self._verify(name, trees.get(name, DraftTree())) for name in stepping]
        self.drafter.observe([seen for seen in observations if seen.request_id in trees])
        self.pool.check_integrity()

    def _place(self, name: str) -> bool:
        request = self.requests[name]
        known = len(request.token_ids)
        if not request.is_placed:
            if self.pool.num_available < 2 + known // BLOCK_SIZE:
                return False
            request.num_computed_tokens = self.pool.open(
                name, request.token_ids, request.cache_salt, known - 1
            )
            request.is_placed = True
        if not self.pool.allocate(name, known):
            self.preempt(name)
            return False
        return True

    def _ask(self, name: str) -> DraftRequest:
        request = self.requests[name]
        known = len(request.token_ids)
        covered = self.pool.allocate_draft(name, known + request.max_nodes)
        return DraftRequest(
            name,
            request.token_ids,
            max(0, min(request.max_nodes, covered - known)),
            request.shape,
            self.sampling,
            request.num_computed_tokens,
            self.pool.block_table(name),
            self.tokens_per_second,
            self.row_prices,
        )

    def _verify(self, name: str, tree: DraftTree) -> Observation:
        request = self.requests[name]
        anchor = len(request.token_ids) - 1
        path, emitted = verify_step(tree, request.token_ids, target)
        row_token_ids = [request.token_ids[-1], *tree.token_ids]
        request.token_ids += emitted
        request.num_computed_tokens = anchor + len(path)
        request.trees.append(tree)
        request.num_accepted += len(path) - 1
        request.num_steps += 1
        # Where the rows are the target's own, verification wrote the accepted ones anew.
        if not self.model.owns_rows:
            self._target_writes(name, request)
        self.pool.promote(name, request.token_ids, request.num_computed_tokens)
        self.pool.free_draft(name)
        return Observation(name, request.token_ids, tree, row_token_ids, path, emitted)

    def _target_writes(self, name: str, request: Running) -> None:
        table = self.pool.block_table(name)
        for position in range(request.num_computed_tokens):
            slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            self.model.rows[slot] = tuple(request.token_ids[: position + 1])
