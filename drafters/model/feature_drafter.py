"""Drafting with a model that reads the target's hidden states.

Rounds, trees and their prices are those of every draft model; besides, rows of known tokens read the
target's own states, and rows of accepted drafts are run again with them.

States exist where the target computes, and nowhere else: of tokens that came from the prefix cache there
are none. So a request takes of a cached prefix what has its rows in the model's store already
(``num_usable_tokens``), and no row is left behind: what a request did not run while it had blocks is run
when it leaves them, without a score, all such requests at once. Where a token's row reads the state of
the token before, the first row after a cached prefix reads what the model keeps behind each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from drafters.base import DraftRequest, DraftShape, HiddenRows
from drafters.model.block_contents import TextDigests
from drafters.model.model_drafter import FirstRound, ModelDrafter
from drafters.model.protocol import DraftRows, FeatureModel

_MOST_WAITING = 512
"""Rows of one request that may wait while nothing is drafted for it."""


class FeatureDrafter(ModelDrafter):
    def __init__(self, model: FeatureModel) -> None:
        super().__init__(model)
        self._features = model
        self.hidden_layers = model.hidden_layers
        self._due: list[tuple[DraftRows, TextDigests]] = []
        self._left: set[str] = set()
        """Requests that have left their blocks since ``settle``; their states are kept until then."""

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        waiting = []
        rows = [each for each in rows if each.first_position < self._model.max_len]
        if rows:
            self._features.take_hidden(rows)
        for each in rows:
            request_id, first, table = each.request_id, each.first_position, each.block_table
            known = self._features.known(request_id)
            text = self._states[request_id].text
            text.update(each.token_ids)
            if self._model.keeps_anchor:
                self._contents.keep_ends(table, text, first, known.stop - first)
            if len(known) > _MOST_WAITING:
                waiting += self._waiting(request_id, each.token_ids, table, known.stop)
        self._catch_up(each for each in waiting if len(each[0].token_ids) > _MOST_WAITING)

    def num_usable_tokens(
        self, token_ids: Sequence[int], block_ids: Sequence[int], cache_salt: str
    ) -> int:
        if len(token_ids) >= self._model.max_len:  # nothing will be drafted
            return len(token_ids)
        size = self._model.block_size
        most = len(block_ids) * size
        text = TextDigests(cache_salt, size)
        text.update(token_ids[:most])
        usable = self._contents.num_valid(block_ids, text, token_ids, most) // size * size
        while usable and not self._has_state_before(block_ids, text, usable):
            usable -= size
        return usable

    def leave_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """Only rows of full blocks can be found again."""
        num_known, size = self._features.known(request_id).stop, self._model.block_size
        self._left.add(request_id)
        self._due += self._waiting(request_id, token_ids, block_ids[:], num_known // size * size)

    def settle(self) -> None:
        due, self._due = self._due, []
        left, self._left = self._left, set()
        try:
            self._catch_up(due)
        finally:
            for request_id in left:
                self._features.forget(request_id)

    def finish(self, request_id: str, state: Any) -> None:  # noqa: ARG002
        if request_id not in self._left:
            self._features.forget(request_id)

    # What may be run

    def _has_room(self, ask: DraftRequest) -> bool:
        """Only once the state is known that chose the anchor: not in a request's first step."""
        num_known = self._features.known(ask.request_id).stop
        return 0 < num_known == len(ask.token_ids) - 1 and super()._has_room(ask)

    def _can_feed(self, turn: FirstRound) -> bool:
        ask = turn.ask
        return self._reaches(ask.request_id, ask.block_table, turn.state.text, turn.num_valid)

    def _reaches(
        self, request_id: str, block_ids: Sequence[int], text: TextDigests, first: int
    ) -> bool:
        """Whether the states are known that rows from position ``first`` on read."""
        known = self._features.known(request_id)
        if known.start <= max(0, first - self._model.keeps_anchor):
            return True
        return known.start == first and self._has_state_before(block_ids, text, first)

    def _has_state_before(self, block_ids: Sequence[int], text: TextDigests, position: int) -> bool:
        """Whether the first row after a cached prefix can be run, as far as earlier states matter."""
        return not self._model.keeps_anchor or self._contents.has_end(block_ids, text, position)

    # Rows that are run for later

    def _waiting(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int], end: int
    ) -> list[tuple[DraftRows, TextDigests]]:
        """Returns a request's rows before position ``end`` that were not run, if there are any and the
        states that they read are known."""
        text, end = self._states[request_id].text, min(end, self._model.max_len)
        first = self._contents.num_valid(block_ids, text, token_ids, end)
        if first >= end or not self._reaches(request_id, block_ids, text, first):
            return []
        ask = DraftRequest(request_id, token_ids, 0, DraftShape(), block_table=block_ids)
        return [(DraftRows(ask, token_ids[first:end], first, 0), text)]

    def _catch_up(self, waiting: Iterable[tuple[DraftRows, TextDigests]]) -> None:
        for batch in _batches(waiting, self._model.max_catch_up_rows):
            rows = [each for each, _ in batch]
            self._forget(rows)
            self._model.read_now(partial(self._model.begin, [rows]))
            for each, text in batch:
                self._contents.write(each.ask.block_table, text, each.base, each.token_ids)

    def _wrote(self, rows: Sequence[DraftRows]) -> None:
        """Rows of drafts are not remembered as the text's, even if accepted: what they read was only
        expected."""
        for each in rows:
            num_kept = len(each.ask.token_ids) - each.base - (not self._model.keeps_anchor)
            if num_kept > 0:
                text = self._states[each.ask.request_id].text
                tokens = each.token_ids[:num_kept]
                self._contents.write(each.ask.block_table, text, each.base, tokens)


def _batches(
    waiting: Iterable[tuple[DraftRows, TextDigests]], most: int
) -> Iterator[list[tuple[DraftRows, TextDigests]]]:
    """Yields rows of all requests in turn, at most ``most`` at once; those of a request in order."""
    batch: list[tuple[DraftRows, TextDigests]] = []
    room = most
    for rows, text in waiting:
        tokens, first = rows.token_ids, rows.base
        while tokens:
            part, tokens = tokens[:room], tokens[room:]
            batch.append((replace(rows, token_ids=part, base=first), text))
            first, room = first + len(part), room - len(part)
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch
