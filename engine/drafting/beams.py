"""Trees whose nodes are chosen on the device: which candidates of a level are followed further.

The same arithmetic as ``drafters.model.growth.DraftGrowth``'s, in the same order and in float64, over all
trees of a batch at once, so that what is launched ahead is what a growth will want when it reads the
candidates. Every level has a number of lanes that the host knows, and rows in slots that it knows; which
node lies in a lane, and whether any does, is the device's. So are the ancestors that a row attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.model.growth import EDGES, NUM_LEVELS, NUM_RANKS
from drafters.model.protocol import Beam, DraftRows
from engine.drafting.candidates import Choice
from engine.transfer import upload

_NONE = float("-inf")


class Lanes(NamedTuple):
    """A level's lanes, ``num_trees`` times as many as the widest has. ``picks``: which candidate of the
    level above is in each, counted through its lanes of ``num_candidates`` each; -1: none is.
    ``above``: which lane that is."""

    token_ids: Tensor  # [num_trees, num_lanes]
    picks: Tensor  # likewise
    above: Tensor  # likewise
    seen: Tensor  # [num_trees, num_lanes, num_nodes] bool: of the tree's nodes, by their slots
    num_candidates: int


class Beams:
    """The trees of a batch, while their levels are launched."""

    def __init__(self, rows: Sequence[DraftRows], device: torch.device) -> None:
        """``rows``: the trees' rows of the first level, of which one each is scored."""
        self._device = device
        self.index = {each.ask.request_id: at for at, each in enumerate(rows)}
        beams = [_beam_of(each) for each in rows]
        self._num_candidates = [each.num_candidates for each in rows]
        self._max_nodes = [each.ask.max_nodes for each in rows]
        self._num_run = [0] * len(rows)
        """Lanes so far."""
        self._least = self._column([beam.min_survival for beam in beams])
        self._counts = upload([beam.counts for beam in beams], device, torch.float64)
        self._strength = self._column([beam.strength for beam in beams])
        self._edges = upload(EDGES, device, torch.float64)
        self._weights = torch.empty(len(rows), 0, dtype=torch.float64, device=device)
        """Of all candidates so far; -inf: of none."""
        self._reached = torch.ones(len(rows), 1, dtype=torch.float64, device=device)
        """Of the lanes of the level that is scored next."""
        size = max(self._max_nodes)
        self._seen = torch.zeros(len(rows), 1, size, dtype=torch.bool, device=device)

    def next(self, choice: Choice, first: Sequence[int], num_lanes: Sequence[int]) -> Lanes:
        """The next level, of so many lanes of each tree. ``first``: where the scored rows of each tree's
        lanes begin in the ``choice``; 0 where it has none."""
        tokens, weights = self._scored(choice, first)
        most = max(num_lanes)
        self._weights = torch.cat([self._weights, weights.flatten(1)], dim=1)
        fits = (weights > self._last_kept()[:, :, None]) & (weights >= self._least[:, :, None])
        scores = torch.where(fits, weights, _NONE).flatten(1)
        scores, picks = scores.sort(dim=1, descending=True, stable=True)
        has_lane = upload(
            [[lane < each for lane in range(most)] for each in num_lanes], self._device
        )
        reached = scores[:, :most].masked_fill(~has_lane, _NONE)
        picks = picks[:, :most]
        num_candidates = weights.shape[2]
        above = picks // num_candidates
        self._reached = reached
        self._seen = self._seen_from(above, num_lanes)
        return Lanes(
            tokens.flatten(1).gather(1, picks),
            picks.masked_fill(reached == _NONE, -1),
            above,
            self._seen,
            num_candidates,
        )

    def _scored(self, choice: Choice, first: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Candidates of all lanes and how likely their paths are accepted: ``[num_trees, num_lanes,
        num_candidates]``, -inf where there is none."""
        last = len(choice.token_ids) - 1
        num_lanes = self._reached.shape[1]
        rows = [[min(at + lane, last) for lane in range(num_lanes)] for at in first]
        index = upload(rows, self._device)
        most = min(max(self._num_candidates), choice.token_ids.shape[1])
        tokens = choice.token_ids[index][..., :most]
        confidences = choice.confidences[index][..., :most].double()
        ranks = torch.arange(most, device=self._device)
        levels = (confidences[..., None] >= self._edges).sum(dim=-1)
        features = levels + NUM_LEVELS * ranks.clamp(max=NUM_RANKS - 1)
        accepted, labelled = (
            self._counts[:, :, at].gather(1, features.flatten(1)).view_as(confidences)
            for at in (0, 1)
        )
        strength = self._strength[:, :, None]
        acceptance = (accepted + strength * confidences) / (labelled + strength)
        acceptance = acceptance.cummin(dim=-1).values.clamp(max=1.0)
        weights = self._reached[:, :, None] * acceptance
        wanted = upload(self._num_candidates, self._device)[:, None, None]
        exists = (confidences > 0) & (ranks < wanted) & (self._reached > _NONE)[:, :, None]
        return tokens, torch.where(exists, weights, _NONE)

    def _last_kept(self) -> Tensor:
        """The least weight that makes it into the tree, where it is full: ``[num_trees, 1]``."""
        most = min(max(self._max_nodes), self._weights.shape[1])
        ranked = self._weights.topk(most, dim=1).values
        last = upload([[min(each, most) - 1] for each in self._max_nodes], self._device)
        size = upload([[each] for each in self._max_nodes], self._device)
        count = (self._weights > _NONE).sum(dim=1, keepdim=True)
        return torch.where(count >= size, ranked.gather(1, last), _NONE)

    def _seen_from(self, above: Tensor, num_lanes: Sequence[int]) -> Tensor:
        """What lanes see: what the lane above sees, and their own slot."""
        size, most = self._seen.shape[2], above.shape[1]
        own = [[run + lane for lane in range(most)] for run in self._num_run]
        self._num_run = [run + each for run, each in zip(self._num_run, num_lanes, strict=True)]
        slots = torch.arange(size, device=self._device)
        seen = self._seen.gather(1, above[:, :, None].expand(-1, -1, size))
        return seen | (upload(own, self._device)[:, :, None] == slots)

    def _column(self, values: Sequence[float]) -> Tensor:
        return upload(values, self._device, torch.float64)[:, None]


def _beam_of(rows: DraftRows) -> Beam:
    assert rows.beam is not None
    return rows.beam
