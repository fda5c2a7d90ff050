"""``stand``: the target's own distributions after each n-gram, sampled as the verifier samples.

Stochastic adaptive n-gram drafting (Song et al. 2025, arXiv 2506.04708): tables of merged distributions
per context (``prob_tables.py``), a static tree that a search found (``slipstream/tools/template``),
children by Gumbel-top-k. Beyond the paper the noise is the verifier's, so a draft is the target's own
choice wherever the stored distribution is right; the prompt's tokens stand in until the target has
spoken about a context; contexts go down to one token, and those shorter than a known one do not learn.
docs/drafters/tables.md.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from drafters.base import (
    GREEDY,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    DraftSampling,
    DraftShape,
    NewRequest,
    Observation,
    Options,
    TextReader,
    drafter,
    in_order,
)
from drafters.contexts import advanced, levels, pack, window_mask
from drafters.tables.prob_tables import NUM_TOKENS_KEPT, ProbTable, TextTable, find
from drafters.tables.sharing import SHARE_OPTION, SharingDrafter
from drafters.tables.template import (
    NO_CHILDREN,
    Children,
    DraftTemplate,
    grow,
    grow_chain,
    load_template,
)
from drafters.tree import DraftTree, chain

SHIPPED_TEMPLATE = Path(__file__).parent / "data" / "stand_template.json"
SHARED_CONTEXTS = 32_768

_MARGINS = (0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0)
_MARGIN_RATIOS = tuple(map(math.exp, _MARGINS))
_FEATURES_PER_SOURCE = 16
_FROM_PROMPT = 3
_FILLER_TOKENS = 64
"""Sampled trees look at so many of the last tokens for some that complete a node's children."""
LEAST_SHARE = 1e-3
"""Tokens with less than this share of the likeliest one's probability are not sampled: they would
hardly ever win, and noise costs a microsecond per token."""


@dataclass(frozen=True, slots=True)
class StandSettings:
    """The operator's settings."""

    template: str | None = field(
        default=None,
        metadata={
            "description": "File with the static draft tree, as slipstream stand-template writes it; "
            "default: the one shipped."
        },
    )


@drafter
class StandDrafter(SharingDrafter[ProbTable]):
    """See the module. ``template_path``: the static tree; None is the one that is shipped."""

    info = DrafterInfo(
        "stand",
        "Samples from the merged distributions that the target gave after the same last tokens, with "
        "the target's own noise. Strong on sampled text and on several samples of one prompt.",
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
        check=partial(in_order, "min_ctx", "max_ctx"),
        needs=DrafterNeeds(top_probs=True),
        cost="Microseconds of CPU time; the target's ten likeliest tokens per verified row.",
        samples=True,
    )
    settings = StandSettings

    def __init__(self, template_path: str | None = None) -> None:
        """Raises ValueError for a template that cannot be read or does not hold together."""
        super().__init__(
            lambda options: ProbTable(int(options["max_contexts"])),
            lambda: ProbTable(SHARED_CONTEXTS),
        )
        path = SHIPPED_TEMPLATE if template_path is None else Path(template_path)
        self._template = load_template(path)

    @classmethod
    def build(cls, context: DrafterContext) -> StandDrafter:
        return cls(cls.settings_in(context).template)

    def state_over(self, request: NewRequest, table: ProbTable) -> StandState:
        return StandState(request.token_ids, request.options, table, self._template)


class StandState(TextReader):
    """One request. Its table may be shared with requests of the same tenant."""

    num_top_tokens = NUM_TOKENS_KEPT

    def __init__(
        self, token_ids: Sequence[int], options: Options, table: ProbTable, template: DraftTemplate
    ) -> None:
        super().__init__(token_ids)
        self._max_ctx = int(options["max_ctx"])
        self._mask = window_mask(self._max_ctx)
        self._levels = levels(range(self._max_ctx, int(options["min_ctx"]) - 1, -1))
        self._table = table
        self._prompt = TextTable(int(options["max_contexts"]))
        self._template = template

    def _read(self, start: int, end: int) -> None:
        before = self._token_ids[max(0, start - self._max_ctx) : start]
        self._prompt.learn_text(self.window(before), self._levels, self._token_ids[start:end])

    def window(self, token_ids: Sequence[int]) -> int:
        """Returns the context at the end of a text."""
        return pack(token_ids[-self._max_ctx :])

    def advanced(self, window: int, token_id: int) -> int:
        return advanced(window, token_id, self._mask)

    def learn(self, window: int, token_ids: Sequence[int], probs: Sequence[float]) -> None:
        """Merges what the target said after ``window``: its likeliest tokens, best first."""
        self._table.learn(window, self._levels, token_ids, probs)

    def observe(self, observation: Observation) -> None:
        """Learns from the rows whose context is the text; other branches were never written."""
        top_token_ids, top_probs = observation.top_token_ids, observation.top_probs
        if top_token_ids is None or top_probs is None:
            return
        self._read_rest()
        text, emitted = observation.token_ids, observation.emitted_token_ids
        first = len(text) - len(emitted)
        window = self.window(text[max(0, first - self._max_ctx) : first])
        learn, context_levels, mask = self._table.learn, self._levels, self._mask
        for index, row in enumerate(observation.path):
            if index:
                window = advanced(window, emitted[index - 1], mask)
            learn(window, context_levels, top_token_ids[row], top_probs[row])

    def propose(self, request: DraftRequest) -> DraftTree:
        self._read_rest()
        root = (self.window(request.token_ids), len(request.token_ids))
        shape, sampling = request.shape, request.sampling
        if shape.width == 1 and sampling.temperature == 0:
            return self._greedy_chain(root[0], request.depth)
        fillers: Sequence[int] = ()

        def expand(state: tuple[int, int]) -> Children:
            return self.children(*state, sampling, fillers)

        if shape.width == 1:
            return grow_chain(request.depth, root, expand, self._advance)
        if sampling.verification != "match" and sampling.temperature > 0:
            # Policies grant by the shape of a tree. If it depended on what was sampled, so would which
            # samples are verified, and the distribution of the text with it. So every node gets all
            # its children.
            recent = dict.fromkeys(reversed(request.token_ids[-_FILLER_TOKENS:]))
            fillers = list(recent)[: shape.width]
            shape = DraftShape(len(fillers), shape.depth)
        nodes = self._template.within(shape)
        return grow(nodes, request.max_nodes, root, expand, self._advance)

    def children(
        self,
        window: int,
        position: int,
        sampling: DraftSampling = GREEDY,
        fillers: Sequence[int] = (),
    ) -> Children:
        """Returns what may follow ``window`` at an absolute position, in drafting order.

        ``fillers`` are sampled with a small probability where fewer tokens are known than fillers are
        given; only where tokens are sampled.
        """
        if fillers:
            return self._filled(window, position, sampling, fillers)
        found = self._known(window)
        if found is None:
            return NO_CHILDREN
        source, token_ids, probs = found
        if sampling.temperature == 0:
            scores = [math.log(prob) if prob > 0 else -math.inf for prob in probs]
            return Children(token_ids, _margin_features(source, scores))
        sampled = sampled_probs(probs, sampling)
        if sampling.verification != "match":
            return _sampled(token_ids[: len(sampled)], sampled, position, sampling)
        order, scores = in_sampled_order(token_ids, sampled, position, sampling)
        return Children(order, _margin_features(source, scores))

    def _filled(
        self, window: int, position: int, sampling: DraftSampling, fillers: Sequence[int]
    ) -> Children:
        found = self._known(window)
        if found is None:
            return _sampled(fillers, [1 / len(fillers)] * len(fillers), position, sampling)
        probs = sampled_probs(found[2], sampling)
        known = found[1][: len(probs)]
        added = [each for each in fillers if each not in known][: max(0, len(fillers) - len(known))]
        weights = [*probs, *[LEAST_SHARE] * len(added)]
        total = sum(weights)
        sampled = [weight / total for weight in weights]
        return _sampled([*known, *added], sampled, position, sampling)

    def _greedy_chain(self, window: int, num_nodes: int) -> DraftTree:
        """The first of the greedy ``children``, and of theirs. The features of the others are left out,
        since this is asked for in every step of every request."""
        token_ids: list[int] = []
        features: list[int] = []
        while len(token_ids) < num_nodes:
            found = self._known(window)
            if found is None:
                break
            source, known, probs = found
            second = probs[1] if len(probs) > 1 else 0.0
            lead = bisect(_MARGIN_RATIOS, probs[0] / second if second else math.inf)
            token_ids.append(known[0])
            features.append(source * _FEATURES_PER_SOURCE + lead)
            window = advanced(window, known[0], self._mask)
        return chain(token_ids, features)

    def _known(self, window: int) -> tuple[int, tuple[int, ...], tuple[float, ...]] | None:
        """Returns the source as in ``_margin_features``, tokens and probabilities of the longest known
        context that ends ``window``."""
        found = find(window, self._levels, self._table, self._prompt)
        if found is None:
            return None
        num_tokens, from_prompt, (_, token_ids, probs) = found
        return _FROM_PROMPT if from_prompt else min(num_tokens, 3) - 1, token_ids, probs

    def _advance(self, state: tuple[int, int], token_id: int) -> tuple[int, int]:
        window, position = state
        return self.advanced(window, token_id), position + 1


def _sampled(
    token_ids: Sequence[int], probs: Sequence[float], position: int, sampling: DraftSampling
) -> Children:
    """Returns children with what they were sampled from; features tell ranks, never tokens."""
    order, _ = in_sampled_order(token_ids, probs, position, sampling)
    features = [min(rank, _FEATURES_PER_SOURCE - 1) for rank in range(len(order))]
    return Children(order, features, dict(zip(token_ids, probs, strict=True)))


def _margin_features(source: int, scores: Sequence[float]) -> list[int]:
    """Returns buckets of (source, distance in score to the best rival): 0..63.

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


def sampled_probs(probs: Sequence[float], sampling: DraftSampling) -> list[float]:
    """Returns the probabilities that the first tokens of a list are sampled with; the others never are.

    Stored probabilities, ``probs``, are the target's at temperature 1, descending. What a request
    samples from is that, tempered, truncated as the request asks, and renormalised over the few tokens
    stored. ``sampling.temperature`` must not be 0.
    """
    exponent, best = 1.0 / sampling.temperature, probs[0]
    least = max(LEAST_SHARE, sampling.min_p)
    weights = []
    for prob in probs[: sampling.top_k] if sampling.top_k > 0 else probs:
        weight: float = (prob / best) ** exponent
        if weight < least:
            break
        weights.append(weight)
    if sampling.top_p < 1:
        left = sampling.top_p * sum(weights)
        for index, weight in enumerate(weights):
            left -= weight
            if left <= 0:
                del weights[index + 1 :]
                break
    total = sum(weights)
    return [weight / total for weight in weights]


def in_sampled_order(
    token_ids: Sequence[int], probs: Sequence[float], position: int, sampling: DraftSampling
) -> tuple[list[int], list[float]]:
    """Gumbel-top-k: tokens by ``log(prob) + noise`` at ``position``, and these scores.

    That samples without replacement, and with the verifier's own noise the first one is the
    verifier's choice wherever the stored distribution is right.
    """
    if len(probs) == 1:
        return [token_ids[0]], [0.0]
    sampled = token_ids[: len(probs)]
    noise = sampling.noise(position, sampled)
    scores = [math.log(prob) + g for prob, g in zip(probs, noise, strict=True)]
    order = sorted(range(len(sampled)), key=scores.__getitem__, reverse=True)
    return [sampled[index] for index in order], [scores[index] for index in order]
