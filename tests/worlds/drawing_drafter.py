"""A drafter that draws from a known law: a Markov chain of order one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from drafters.base import DrafterInfo, DraftRequest
from drafters.tree import ROOT, DraftTree
from worlds.fake_drafters import FakeDrafter

Wrap = Callable[[list[float]], Any]


def as_tensor(probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def as_mapping(probs: list[float]) -> dict[int, float]:
    return dict(enumerate(probs))


class DrawingDrafter(FakeDrafter):
    """Under every node ``branching[depth]`` children, drawn with the noise of the request in
    Gumbel-top-k order, which is without replacement. ``claims`` says what they were drawn from."""

    def __init__(
        self, probs: list[list[float]], branching: Sequence[int], wrap: Wrap = as_tensor
    ) -> None:
        super().__init__("drawing", self.draw)
        self.info = DrafterInfo("drawing", "Draws.", drafts_trees=True, samples=True)
        self.probs = probs
        self.claims = probs
        self._branching = branching
        self._wrap = wrap

    def draw(self, ask: DraftRequest) -> DraftTree:
        position = len(ask.token_ids)
        tree = DraftTree([], [], [], {})
        level = [(ROOT, ask.token_ids[-1])]
        for depth, width in enumerate(self._branching[: ask.shape.depth]):
            below = []
            for parent, last in level:
                size = len(tree)
                if size + width > ask.max_nodes:
                    return tree
                tokens = self._top(ask, position + depth, last, width)
                tree.token_ids.extend(tokens)
                tree.parents.extend([parent] * width)
                # A feature that tells of the token, which no grant may go by.
                tree.features.extend(tokens)
                tree.draft_probs[parent] = self._wrap(self.claims[last])
                below += [(size + i, token_id) for i, token_id in enumerate(tokens)]
            level = below
        return tree

    def _top(self, ask: DraftRequest, position: int, last: int, width: int) -> list[int]:
        probs = self.probs[last]
        noise = ask.sampling.noise(position, range(len(probs)))
        scores = [math.log(p) + g for p, g in zip(probs, noise, strict=True)]
        return sorted(range(len(probs)), key=lambda token_id: -scores[token_id])[:width]
