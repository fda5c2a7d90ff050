"""Heads that draft a block of tokens in one forward: DFlash, and DSpark, which makes a second pass over
it.

For every committed token such a head keeps keys and values made from the target's states alone. A draft
is one forward over a block, the anchor followed by masks, whose rows see all earlier tokens and each
other in both directions. The block's own keys and values are discarded afterwards.

DSpark then decodes left to right: a position's logits are corrected by the token before it, and a
further head estimates how likely the position is to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.model.protocol import Candidates, DraftRows
from engine.attention.backend import AttentionBackend
from engine.batch import InputBatch, InputBuffers, RequestRows, slot_of
from engine.drafting.draft_model import Choice, DraftLimits, request_rows
from engine.drafting.head_model import HeadModel
from engine.drafting.published.networks import BlockNetwork
from engine.transfer import Readback, upload


class _Block(NamedTuple):
    """A forward's output for a request's positions; the first follows the anchor."""

    hidden: Tensor  # [num_positions, hidden_size]
    logits: Tensor  # [num_positions, draft_vocab_size]


class BlockHead(HeadModel):
    """Runs a ``BlockNetwork``."""

    first_row = 0
    keeps_anchor = False
    state_offset = 0

    def __init__(
        self, network: BlockNetwork, attention: AttentionBackend, limits: DraftLimits
    ) -> None:
        super().__init__(network, attention, limits)
        self._network = network
        first = torch.zeros(1, dtype=torch.long, device=self._device)
        self.is_sequential = network.markov(first) is not None
        num_positions = network.block_size - (not network.anchor_predicts)
        self.num_slots = network.block_size - 1
        self.num_parallel = 1 if self.is_sequential else num_positions
        self.most_depth = num_positions
        self._buffers = InputBuffers(attention.store.device, limits.max_catch_up_rows)

    def _rows_of(self, rows: DraftRows) -> RequestRows:
        """The block of a request that drafts; none of one that only catches up. Later levels of a
        sequential head run no rows: theirs say where their tokens would stand."""
        if not self._is_known(rows):
            return request_rows(rows)
        anchor = len(rows.ask.token_ids) - 1
        room = len(rows.ask.block_table) * self.block_size - anchor
        count = min(self._network.block_size, room) if rows.num_scored else 0
        block = [rows.token_ids[-1], *[self._network.mask_token_id] * (count - 1)][:count]
        return RequestRows(block, count, anchor, (), rows.ask.block_table, self._num_results(rows))

    def _num_results(self, rows: DraftRows) -> int:
        if not self._is_known(rows) or not rows.num_scored:
            return rows.num_scored
        if self.is_sequential:
            return 1
        return min(self._num_positions(rows), rows.ask.depth)

    def _num_positions(self, rows: DraftRows) -> int:
        """Returns of how many positions behind the anchor its block says something."""
        room = len(rows.ask.block_table) * self.block_size - len(rows.ask.token_ids) + 1
        return min(self._network.block_size, room) - (not self._network.anchor_predicts)

    def _positions(self, rows: Sequence[DraftRows], batch: InputBatch) -> list[int]:
        found: list[int] = []
        for each, run in zip(rows, batch.requests, strict=True):
            if self._is_known(each):
                end = len(each.ask.token_ids)
                found += range(end, end + self._num_results(each))
            else:
                last = run.first_row + run.num_rows
                found += [at + 1 for at in batch.positions[last - each.num_scored : last]]
        return found

    def _choose(
        self, rows: Sequence[DraftRows], chosen: Tensor | None, readback: Readback
    ) -> Choice | None:
        choice = super()._choose(rows, chosen, readback)
        if choice is None or not self.is_sequential:
            return choice
        confidences = self._confidences(rows, chosen)
        if confidences is None:
            return choice
        sure = readback.add(confidences)

        def finish() -> list[Candidates]:
            return [
                _believed(each, share)
                for each, share in zip(choice.finish(), sure.tolist(), strict=True)
            ]

        return Choice(choice.token_ids, finish)

    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> Tensor:
        known = [each for each in rows if self._is_known(each)]
        if known:
            self._write_context(known)
            if batch.num_rows:
                self._run_blocks(rows, batch)
        parts = []
        for each in rows:
            count = self._num_results(each)
            if not count:
                continue
            block: _Block = self._drafted[each.ask.request_id]
            parts.append(block.logits[_depths(each) if self.is_sequential else slice(count)])
        if not parts:
            return torch.empty(0)
        logits = torch.cat(parts)
        added = self._network.markov(self._tokens(rows, batch.chosen))
        return logits if added is None else logits + added

    def _confidences(self, rows: Sequence[DraftRows], chosen: Tensor | None) -> Tensor | None:
        """Returns the head's own word on the first candidate of each scored row; None: it has none."""
        hidden = torch.cat(
            [
                self._drafted[each.ask.request_id].hidden[_depths(each)]
                for each in rows
                if self._num_results(each)
            ]
        )
        return self._network.confidence(hidden, self._tokens(rows, chosen))

    def _tokens(self, rows: Sequence[DraftRows], chosen: Tensor | None) -> Tensor:
        """Returns the tokens that the scored positions follow."""
        if chosen is not None:
            return chosen
        scored = [each for each in rows if self._num_results(each)]
        tokens = [token for each in scored for token in each.token_ids[-each.num_scored :]]
        return upload(tokens, self._device)

    def _write_context(self, rows: Sequence[DraftRows]) -> None:
        """Stores keys and values of the known tokens before the anchor."""
        parts: list[Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        for each in rows:
            count = len(each.token_ids) - bool(each.num_scored)
            if not count:
                continue
            parts.append(self._read(each, count))
            places = range(each.base, each.base + count)
            positions += places
            slots += [slot_of(each.ask.block_table, at, self.block_size) for at in places]
        if not parts:
            return
        where = upload([positions, slots], self._device)
        made = self._network.context(torch.cat(parts), where[0])
        for layer, (keys, values) in enumerate(made):
            self._attention.write(layer, where[1], keys, values)

    def _run_blocks(self, rows: Sequence[DraftRows], batch: InputBatch) -> None:
        inputs = self._buffers.fill(batch)
        plan = self._attention.plan(batch, inputs)
        hidden = self._network.forward(inputs.token_ids, inputs.positions, plan)
        skipped = not self._network.anchor_predicts
        drafting = [
            (each, run) for each, run in zip(rows, batch.requests, strict=True) if run.num_rows
        ]
        picked = [
            hidden[run.first_row + skipped : run.first_row + run.num_rows] for _, run in drafting
        ]
        logits = self._network.logits(torch.cat(picked)).split([len(each) for each in picked])
        for (each, _), own, said in zip(drafting, picked, logits, strict=True):
            self._drafted[each.ask.request_id] = _Block(own, said)


def _depths(rows: DraftRows) -> list[int]:
    """Returns which of the block's positions follow the tokens of a request's scored rows."""
    first = len(rows.ask.token_ids)
    if rows.base < first:
        return [0]
    if not rows.parents:
        return [rows.base - first + at + 1 for at in range(len(rows.token_ids))]
    depths: list[int] = []
    for parent in rows.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths[rows.num_stored :]


def _believed(candidates: Candidates, accepted: float) -> Candidates:
    """Returns the candidates with the head's own word on the first of them; what it leaves is shared by
    the others as their probabilities are. Sampled ones keep what they were sampled with."""
    shares = candidates.confidences
    if candidates.distribution is not None or not shares:
        return candidates
    rest = max(1e-6, 1.0 - shares[0])
    others = [share / rest * (1.0 - accepted) for share in shares[1:]]
    return Candidates(candidates.token_ids, [accepted, *others])
