"""``stand``: the target's own distributions after each n-gram, drawn from as the verifier draws.

Stochastic adaptive n-gram drafting (Song et al. 2025, arXiv 2506.04708), written from its
description: tables of merged distributions per context (``drafters.tables.prob_tables``), a static tree
that an optimiser found (``drafters.tables.template_search``), children by Gumbel-top-k. Beyond the paper:

- the Gumbel noise is the verifier's, so a draft is the target's own choice wherever the stored
  distribution is right; candidates are tempered and truncated as the request asks;
- tokens of the prompt stand in until the target has spoken about a context;
- contexts shorter than one that is known do not learn, since they are not what is read then;
- contexts go down to one token ("2-gram" can be read so, and misses get fewer);
- contexts are bounded, and shared only within a tenant that asks for it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drafters.base import (
    GREEDY,
    DrafterInfo,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    DraftSampling,
    DraftShape,
    Observation,
    OptionValue,
)
from drafters.contexts import TOKEN_BITS, pack, window_mask
from drafters.tables.drawing import LEAST_SHARE, drawn_probs, in_drawn_order
from drafters.tables.prob_tables import NUM_TOKENS_KEPT, ProbTable, TextTable, find, levels
from drafters.tables.sharing import SHARE_OPTION, SharingDrafter
from drafters.tables.template import NO_CHILDREN, Children, DraftTemplate, grow, load_template
from drafters.tree import EMPTY, DraftTree

SHIPPED_TEMPLATE = Path(__file__).parent / "data" / "stand_template.json"
SHARED_CONTEXTS = 32_768

_MARGINS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0)
_MARGIN_RATIOS = tuple(map(math.exp, _MARGINS))
_FEATURES_PER_SOURCE = 16
_FROM_PROMPT = 3
_FILLER_TOKENS = 64
"""How far back drawn trees look for tokens that complete a node's children."""


class StandInfo(DrafterInfo):
    """Adds the check that spans two options."""

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        options = DrafterInfo.resolve(self, given)
        if int(options["min_ctx"]) > int(options["max_ctx"]):
            raise ValueError("min_ctx must not exceed max_ctx")
        return options


INFO = StandInfo(
    name="stand",
    description=(
        "Draws from the merged distributions that the target gave after the same last tokens, with "
        "the target's own noise. Strong on sampled text and on several samples of one prompt."
    ),
    drafts_trees=True,
    options=(
        DrafterOption("max_ctx", 4, "Longest context looked up, in tokens.", 1, 8),
        DrafterOption("min_ctx", 1, "Shortest context looked up, in tokens.", 1, 8),
        DrafterOption(
            "max_contexts",
            32_768,
            "Contexts remembered, of the output and of the prompt each; the least recently seen go "
            "first. A shared table has its own bound.",
            1_024,
            1e6,
        ),
        SHARE_OPTION,
    ),
    needs=DrafterNeeds(top_probs=True),
    cost="Microseconds of CPU time; the target's ten likeliest tokens per verified row.",
    draws=True,
)


class StandDrafter(SharingDrafter[ProbTable]):
    """See the module. ``template_path``: the static tree; None is the one that is shipped."""

    def __init__(self, template_path: str | None = None) -> None:
        """Raises ValueError for a template that cannot be read or does not hold together."""
        path = SHIPPED_TEMPLATE if template_path is None else Path(template_path)
        template = load_template(path)
        super().__init__(
            INFO,
            partial(StandState, template=template),
            lambda options: ProbTable(int(options["max_contexts"])),
            lambda: ProbTable(SHARED_CONTEXTS),
        )


class StandState:
    """One request. Its table may be shared with requests of the same tenant."""

    num_top_tokens = NUM_TOKENS_KEPT

    def __init__(
        self,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        table: ProbTable,
        template: DraftTemplate,
    ) -> None:
        self._max_ctx = int(options["max_ctx"])
        self._mask = window_mask(self._max_ctx)
        self._levels = levels(self._max_ctx, int(options["min_ctx"]))
        self._table = table
        self._prompt = TextTable(int(options["max_contexts"]))
        self._template = template
        window = 0
        for token_id in token_ids:
            self._prompt.learn(window, self._levels, token_id)
            window = self.advanced(window, token_id)

    def window(self, token_ids: Sequence[int]) -> int:
        """The context at the end of a text."""
        return pack(token_ids[-self._max_ctx :])

    def advanced(self, window: int, token_id: int) -> int:
        return ((window << TOKEN_BITS) | (token_id + 1)) & self._mask

    def learn(self, window: int, token_ids: Sequence[int], probs: Sequence[float]) -> None:
        """Merge what the target said after ``window``: its likeliest tokens, best first."""
        self._table.learn(window, self._levels, token_ids, probs)

    def observe(self, observation: Observation) -> None:
        """Learn from the rows whose context is the text; other branches were never written."""
        top_token_ids, top_probs = observation.top_token_ids, observation.top_probs
        if top_token_ids is None or top_probs is None:
            return
        text, emitted = observation.token_ids, observation.emitted_token_ids
        first = len(text) - len(emitted)
        window = self.window(text[max(0, first - self._max_ctx) : first])
        learn, context_levels, mask = self._table.learn, self._levels, self._mask
        for index, row in enumerate(observation.path):
            if index:
                window = ((window << TOKEN_BITS) | (emitted[index - 1] + 1)) & mask
            learn(window, context_levels, top_token_ids[row], top_probs[row])

    def propose(self, request: DraftRequest) -> DraftTree:
        if min(request.max_nodes, request.shape.depth) < 1:
            return EMPTY
        root = (self.window(request.token_ids), len(request.token_ids))
        if request.shape.width == 1:
            if request.sampling.temperature == 0:
                return self._greedy_chain(root[0], min(request.max_nodes, request.shape.depth))
            return self._chain(root, request)
        shape, sampling = request.shape, request.sampling
        fillers: Sequence[int] = ()
        if sampling.verification != "match" and sampling.temperature > 0:
            # Policies grant by the shape of a tree. If it depended on what was drawn, so would which
            # draws are verified, and the output's law with it. So every node gets all its children.
            recent = dict.fromkeys(reversed(request.token_ids[-_FILLER_TOKENS:]))
            fillers = list(recent)[: shape.width]
            shape = DraftShape(len(fillers), shape.depth)
        expand = partial(self._expand, sampling, fillers)
        nodes = self._template.within(shape)
        return grow(nodes, request.max_nodes, root, expand, self._advance)

    def children(
        self,
        window: int,
        position: int,
        sampling: DraftSampling = GREEDY,
        fillers: Sequence[int] = (),
    ) -> Children:
        """What may follow ``window`` at an absolute position, in drafting order.

        ``fillers`` are drawn with a small probability where fewer tokens are known than fillers are
        given; only for sampling that draws.
        """
        if fillers:
            return self._filled(window, position, sampling, fillers)
        found = find(window, self._levels, self._table, self._prompt)
        if found is None:
            return NO_CHILDREN
        num_tokens, from_prompt, (_, token_ids, probs) = found
        source = _FROM_PROMPT if from_prompt else min(num_tokens, 3) - 1
        if sampling.temperature == 0:
            scores = [math.log(prob) if prob > 0 else -math.inf for prob in probs]
            return Children(token_ids, _margin_features(source, scores))
        drawn = drawn_probs(probs, sampling)
        if sampling.verification != "match":
            return _drawn(token_ids[: len(drawn)], drawn, position, sampling)
        order, scores = in_drawn_order(token_ids, drawn, position, sampling)
        return Children(order, _margin_features(source, scores))

    def _likeliest(self, window: int) -> tuple[int, int] | None:
        """Token and feature of the first of the greedy ``children``."""
        found = find(window, self._levels, self._table, self._prompt)
        if found is None:
            return None
        num_tokens, from_prompt, (_, token_ids, probs) = found
        source = _FROM_PROMPT if from_prompt else min(num_tokens, 3) - 1
        if len(probs) == 1 or probs[1] == 0:
            return token_ids[0], source * _FEATURES_PER_SOURCE + len(_MARGINS)
        lead = bisect(_MARGIN_RATIOS, probs[0] / probs[1])
        return token_ids[0], source * _FEATURES_PER_SOURCE + lead

    def _filled(
        self, window: int, position: int, sampling: DraftSampling, fillers: Sequence[int]
    ) -> Children:
        found = find(window, self._levels, self._table, self._prompt)
        if found is None:
            return _drawn(fillers, [1 / len(fillers)] * len(fillers), position, sampling)
        token_ids, probs = found[2].token_ids, drawn_probs(found[2].probs, sampling)
        known = token_ids[: len(probs)]
        added = [each for each in fillers if each not in known][: max(0, len(fillers) - len(known))]
        weights = [*probs, *[LEAST_SHARE] * len(added)]
        total = sum(weights)
        drawn = [weight / total for weight in weights]
        return _drawn([*known, *added], drawn, position, sampling)

    def _greedy_chain(self, window: int, num_nodes: int) -> DraftTree:
        token_ids: list[int] = []
        features: list[int] = []
        mask = self._mask
        for _ in range(num_nodes):
            found = self._likeliest(window)
            if found is None:
                break
            token_id, feature = found
            token_ids.append(token_id)
            features.append(feature)
            window = ((window << TOKEN_BITS) | (token_id + 1)) & mask
        return DraftTree(token_ids, range(-1, len(token_ids) - 1), features)

    def _chain(self, root: tuple[int, int], request: DraftRequest) -> DraftTree:
        """The first draw at every depth, as deep as the request allows."""
        token_ids: list[int] = []
        features: list[int] = []
        draft_probs: dict[int, Mapping[int, float]] = {}
        window, position = root
        for depth in range(min(request.max_nodes, request.shape.depth)):
            children = self.children(window, position + depth, request.sampling)
            if not children.token_ids:
                break
            if children.draft_probs is not None:
                draft_probs[depth - 1] = children.draft_probs
            token_ids.append(children.token_ids[0])
            features.append(children.features[0])
            window = self.advanced(window, token_ids[-1])
        return DraftTree(token_ids, range(-1, len(token_ids) - 1), features, draft_probs)

    def _expand(
        self, sampling: DraftSampling, fillers: Sequence[int], state: tuple[int, int]
    ) -> Children:
        return self.children(*state, sampling, fillers)

    def _advance(self, state: tuple[int, int], token_id: int) -> tuple[int, int]:
        window, position = state
        return self.advanced(window, token_id), position + 1


def _drawn(
    token_ids: Sequence[int], probs: Sequence[float], position: int, sampling: DraftSampling
) -> Children:
    """Children with what they were drawn from; features tell ranks, never tokens."""
    order, _ = in_drawn_order(token_ids, probs, position, sampling)
    features = [min(rank, _FEATURES_PER_SOURCE - 1) for rank in range(len(order))]
    return Children(order, features, dict(zip(token_ids, probs, strict=True)))


def _margin_features(source: int, scores: Sequence[float]) -> list[int]:
    """Buckets of (source, distance in score to the best rival): 0..63.

    ``source``: 0 to 2 for contexts of 1, of 2 and of more tokens, 3 for the prompt's word. The
    first child leads by its margin; each other one trails by its own.
    """
    first = source * _FEATURES_PER_SOURCE
    if len(scores) == 1:
        return [first + len(_MARGINS)]
    best = scores[0]
    lead = bisect(_MARGINS, best - scores[1])
    trailing = first + len(_MARGINS) + 1
    return [first + lead, *(trailing + bisect(_MARGINS, best - score) for score in scores[1:])]
