"""Heads that draft token after token from the target's hidden states: EAGLE-3, MTP; P-EAGLE in one go.

The row of token j lies in token j's slot of a store of the head's own, under the target's block ids. It
is made of the token's embedding and the target's states of token j - 1, so token 0 has none. Rows of
drafted tokens read what the head itself made of the row before. P-EAGLE drafts all its tokens in one
forward: behind the known rows stand rows that hold a mask in both places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from drafters.base import HiddenRows
from drafters.model.protocol import DraftRows
from drafters.tree import ROOT
from engine.attention.backend import AttentionBackend, AttentionPlan
from engine.batch import (
    NORMED,
    ForwardOutput,
    InputBatch,
    InputBuffers,
    InputTensors,
    RequestRows,
)
from engine.capture.replays import GraphSizes, make_replays
from engine.drafting.draft_model import DraftLimits, LevelModel, request_rows
from engine.drafting.published.networks import ChainNetwork, MaskedNetwork, Network
from engine.drafting.states import BlockEnds, StateMemory, Stretch, TextStates

_FEATURES = (NORMED,)
"""All forwards hand out what their rows make for others."""


class HeadModel(LevelModel):
    """A head that reads the target's hidden states (``drafters.model.protocol.FeatureModel``), as far as
    its methods have it in common. ``hidden_layers``: those whose states it reads."""

    owns_rows = True
    state_offset: int
    """A row reads the states of the token so many before its own."""

    def __init__(self, network: Network, attention: AttentionBackend, limits: DraftLimits) -> None:
        super().__init__(attention, limits, network.token_map)
        self.hidden_layers = network.hidden_layers
        self.candidate_layers = network.candidate_layers
        self._texts: dict[str, TextStates] = {}
        self._memory_of_states = StateMemory()
        self._ends: BlockEnds | None = None
        self._drafted: dict[str, Any] = {}
        """Outputs of a request's first level that later levels of its draft read. They are part of the
        batch's, so they are kept while drafts are made, and no longer."""

    def read_layers(self, layers: tuple[int, ...]) -> None:
        """From now on it reads these, one of ``candidate_layers``."""
        self.hidden_layers = layers

    @torch.inference_mode()
    def take_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Copies the target's states of newly committed tokens, of all requests in one go. All drafts
        are over by then."""
        self._drafted.clear()
        by_layer = [torch.cat(parts) for parts in zip(*(each.hidden for each in rows), strict=True)]
        states = by_layer[0] if len(by_layer) == 1 else torch.cat(by_layer, dim=-1)
        places = self._memory_of_states.add(states)
        stretches = [
            Stretch(each.first_position, len(each.hidden[0]), each.block_table) for each in rows
        ]
        start = 0
        for each, (first, count, _) in zip(rows, stretches, strict=True):
            if each.request_id not in self._texts:
                self._texts[each.request_id] = TextStates(self._memory_of_states)
            self._texts[each.request_id].add(first, places[start : start + count])
            start += count
        if self.state_offset:
            self._kept_ends(states).keep(stretches, states)

    def block_ends(self, size: int, dtype: torch.dtype) -> BlockEnds | None:
        """Returns what keeps the states behind blocks, which are of the target's ``size`` and ``dtype``
        in each layer; None: its rows read none."""
        if not self.state_offset:
            return None
        width = len(self.hidden_layers) * size
        return self._kept_ends(torch.empty(1, width, dtype=dtype, device=self._device))

    def known(self, request_id: str) -> range:
        text = self._texts.get(request_id)
        return range(0) if text is None else text.known

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            text.clear()
        self._drafted.pop(request_id, None)

    def _kept_ends(self, states: Tensor) -> BlockEnds:
        """Made when the first states come, whose width and type are the target's."""
        if self._ends is None:
            self._ends = BlockEnds(self._attention.store.num_blocks, self.block_size, states[0])
        return self._ends

    def _read(self, rows: DraftRows, count: int) -> Tensor:
        """Returns the states that the first ``count`` rows of known tokens read, ``[count, width]``."""
        text = self._texts[rows.ask.request_id]
        assert text.places, "no states are known of a text whose rows are to be run"
        read = text.before(rows.base + 1 - self.state_offset, count)
        if self.state_offset and rows.base == text.first:
            kept = self._kept_ends(read).before(rows.base, rows.ask.block_table)
            if kept is not None:
                read[0] = kept
        text.drop(rows.base + count - self.state_offset)
        return read

    @staticmethod
    def _is_known(rows: DraftRows) -> bool:
        """Whether these are rows of known tokens, not of drafted ones."""
        return rows.base < len(rows.ask.token_ids)


class ChainHead(HeadModel):
    """Runs a ``ChainNetwork``."""

    first_row = 1
    keeps_anchor = True
    state_offset = 1

    def __init__(
        self,
        network: ChainNetwork,
        attention: AttentionBackend,
        limits: DraftLimits,
        graphs: GraphSizes | None = None,
    ) -> None:
        """``graphs``: what ``prepare`` captures where the device has graphs; None: nothing."""
        super().__init__(network, attention, limits)
        self._network = network
        self._buffers = InputBuffers(attention.store.device, limits.max_catch_up_rows)
        self._replays = make_replays(self._planned, attention, graphs, limits.max_catch_up_rows)
        self._memories: list[Tensor] = []
        self.num_parallel = network.num_parallel
        self.num_slots = network.num_parallel - 1
        if graphs is not None:
            self._memory(graphs.most_rows)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures what is captured at start. Once, while the store is unused."""
        self._replays.prepare(_FEATURES)

    def _planned(self, batch: InputBatch) -> Callable[[], ForwardOutput]:
        """Plans a batch that is captured, and returns its forward."""
        return partial(self._run, *self._plan(batch), self._memory(batch.num_rows))

    @property
    def _masked(self) -> MaskedNetwork:
        return cast(MaskedNetwork, self._network)

    def _rows_of(self, rows: DraftRows) -> RequestRows:
        """Masks stand behind known rows that are scored, as far as there are slots."""
        found = request_rows(rows)
        found.first_key = self.first_row
        num_masks = self._num_results(rows) - 1 if self._is_known(rows) else 0
        if num_masks > 0:
            found.token_ids = [*rows.token_ids, *[self._masked.mask_token_id] * num_masks]
            found.num_known += num_masks
            found.num_logits += num_masks
        return found

    def _num_results(self, rows: DraftRows) -> int:
        if self.num_parallel == 1 or not rows.num_scored:
            return rows.num_scored
        room = len(rows.ask.block_table) * self.block_size - len(rows.ask.token_ids)
        return min(self.num_parallel, rows.ask.depth, room + 1)

    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> Tensor:
        batch.hidden_layers = _FEATURES
        padded = self._replays.pad(batch)
        features = self._memory(padded.num_rows)
        self._fill(rows, batch, features)
        inputs, plan = self._plan(padded)
        output = self._replays.forward(padded, plan, partial(self._run, inputs, plan, features))
        made = output.hidden[0].clone()
        for each, run in zip(rows, batch.requests, strict=True):
            self._keep(each, made[run.first_row : run.first_row + run.num_rows])
        return output.logits[: len(batch.logits_indices)]

    def _fill(self, rows: Sequence[DraftRows], batch: InputBatch, features: Tensor) -> None:
        """Puts each row's features into its place."""
        known = [each for each in rows if self._is_known(each)]
        read = [self._read(each, len(each.token_ids)) for each in known]
        states = read[0] if len(read) == 1 else torch.cat(read) if read else None
        fused = iter(() if states is None else self._network.fuse(states).split([*map(len, read)]))
        for each, run in zip(rows, batch.requests, strict=True):
            place = features[run.first_row : run.first_row + run.num_rows]
            if not self._is_known(each):
                place.copy_(self._own(each))
                continue
            own = next(fused)
            place[: len(own)] = own
            if len(place) > len(own):
                place[len(own) :] = self._masked.mask_feature()

    def _own(self, rows: DraftRows) -> Tensor:
        """Returns what the head made of the rows' parents."""
        drafted: list[Tensor] = self._drafted[rows.ask.request_id]
        if rows.parents:
            return torch.stack([drafted[at - ROOT] for at in rows.parents[rows.num_stored :]])
        return drafted[rows.base - len(rows.ask.token_ids)][None]

    def _keep(self, rows: DraftRows, made: Tensor) -> None:
        """Keeps the features of the anchor and of drafted rows, in order of slots."""
        request_id = rows.ask.request_id
        if not self._is_known(rows):
            self._drafted[request_id] += made.unbind(0)
        elif rows.num_scored:
            # Masks draft all there is to draft: nobody reads what they made.
            self._drafted[request_id] = [made[len(rows.token_ids) - 1]]

    def _memory(self, num_rows: int) -> Tensor:
        """Returns the memory in which forwards of so many rows read features: it keeps its place."""
        fitting = [each for each in self._memories if num_rows <= len(each)]
        if not fitting:
            size = max(self.max_catch_up_rows, 2 * num_rows), self._network.feature_size
            fitting = [torch.zeros(size, dtype=self._attention.needs.dtype, device=self._device)]
            self._memories += fitting
        return fitting[0][:num_rows]

    def _plan(self, batch: InputBatch) -> tuple[InputTensors, AttentionPlan]:
        """Rows stand where the tokens do whose states they read. Padding stands at position 0."""
        positions = [max(0, each - self.state_offset) for each in batch.positions]
        inputs = self._buffers.fill(replace(batch, positions=positions))
        return inputs, self._attention.plan(batch, inputs)

    def _run(self, inputs: InputTensors, plan: AttentionPlan, features: Tensor) -> ForwardOutput:
        """``hidden``: what each row makes for the next."""
        made, read = self._network.forward(inputs.token_ids, features, inputs.positions, plan)
        picked = read.index_select(0, inputs.logits_indices)
        return ForwardOutput(self._network.logits(picked), (made,))
