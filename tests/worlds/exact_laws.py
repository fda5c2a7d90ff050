"""Every course that a verification can take, with its probability as a fraction: for proofs by
enumeration over toy vocabularies."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from drafters.tree import ROOT, DraftTree
from engine.verification.rejection import Decision, Rule

Text = tuple[int, ...]
Model = Callable[[Text], "ExactProbs"]
"""The distribution after a text."""


@dataclass(frozen=True)
class ExactProbs:
    """``engine.verification.rejection.Probs`` in fractions."""

    values: tuple[Fraction, ...]

    def of(self, token_id: int) -> Fraction:
        return self.values[token_id]

    def residual(
        self, draft: ExactProbs, weight: Fraction | int = 1
    ) -> tuple[Fraction, ExactProbs | None]:
        pairs = zip(self.values, draft.values, strict=True)
        return _normalised([max(Fraction(0), weight * mine - other) for mine, other in pairs])

    def without(self, token_id: int) -> ExactProbs | None:
        others = [v if i != token_id else Fraction(0) for i, v in enumerate(self.values)]
        return _normalised(others)[1]


def _normalised(masses: Sequence[Fraction]) -> tuple[Fraction, ExactProbs | None]:
    mass = sum(masses, Fraction(0))
    return mass, (ExactProbs(tuple(each / mass for each in masses)) if mass else None)


def exact(*weights: int) -> ExactProbs:
    return ExactProbs(tuple(Fraction(each, sum(weights)) for each in weights))


def always(probs: ExactProbs) -> Model:
    """The same distribution after every text."""
    return lambda _: probs


def random_model(seed: int, vocab_size: int, zeros: bool = False) -> Model:
    """Small random weights after every text; with ``zeros`` some tokens are impossible."""

    @cache
    def model(text: Text) -> ExactProbs:
        rng = random.Random(hash((seed, text)))
        weights = [rng.randrange(0 if zeros else 1, 6) for _ in range(vocab_size)]
        return exact(*weights) if any(weights) else exact(*[1] * vocab_size)

    return model


@dataclass(frozen=True)
class ExactDistributions:
    """``rejection.Distributions`` of a tree. ``drawn[row]``: its children came from the draft model."""

    tree: DraftTree
    target_model: Model
    draft_model: Model | None

    def target(self, row: int) -> ExactProbs:
        return self.target_model(path_of(self.tree, row))

    def draft(self, row: int) -> ExactProbs | None:
        return self.draft_model and self.draft_model(path_of(self.tree, row))


def path_of(tree: DraftTree, row: int) -> Text:
    path: list[int] = []
    while row > 0:
        path.insert(0, tree.token_ids[row - 1])
        row = tree.parents[row - 1] + 1
    return tuple(path)


def drawn_trees(model: Model, branching: Sequence[int]) -> Iterator[tuple[Fraction, DraftTree]]:
    """All trees whose nodes at depth i have ``branching[i]`` children, drawn without replacement."""
    pending: list[tuple[Fraction, DraftTree, list[tuple[int, int]]]] = [
        (Fraction(1), DraftTree(), [(ROOT, 0)])
    ]
    while pending:
        weight, tree, open_nodes = pending.pop()
        if not open_nodes:
            yield weight, tree
            continue
        (parent, depth), *others = open_nodes
        if depth == len(branching):
            pending.append((weight, tree, others))
            continue
        for chance, tokens in draws(model(path_of(tree, parent + 1)), branching[depth]):
            size = len(tree)
            grown = DraftTree(
                [*tree.token_ids, *tokens],
                [*tree.parents, *[parent] * len(tokens)],
                [0] * (size + len(tokens)),
            )
            opened = [(size + i, depth + 1) for i in range(len(tokens))]
            pending.append((weight * chance, grown, others + opened))


def draws(probs: ExactProbs, num: int) -> Iterator[tuple[Fraction, Text]]:
    """Ordered draws without replacement; fewer where fewer tokens are possible."""
    num = min(num, sum(each > 0 for each in probs.values))
    for tokens in itertools.permutations(range(len(probs.values)), num):
        chance, left = Fraction(1), Fraction(1)
        for token_id in tokens:
            chance *= probs.of(token_id) / left if left else 0
            left -= probs.of(token_id)
        if chance:
            yield chance, tokens


class _Course:
    """Answers as prescribed, then yes; with the probability of all of them."""

    def __init__(self, given: list[bool]) -> None:
        self._given = given
        self.answers: list[bool] = []
        self.weight = Fraction(1)

    def accepts(self, row: int, chance: float) -> bool:
        assert 0 <= chance <= 1
        assert row > 0
        known = len(self.answers) < len(self._given)
        answer = self._given[len(self.answers)] if known else True
        self.answers.append(answer)
        self.weight *= chance if answer else 1 - chance
        return answer

    def alternatives(self) -> Iterator[list[bool]]:
        """Courses that part from this one where it was free to answer."""
        for index in range(len(self._given), len(self.answers)):
            yield [*self.answers[:index], False]


def decisions(rule: Rule, distributions: ExactDistributions) -> Iterator[tuple[Fraction, Decision]]:
    """Every course of answers with its probability."""
    pending: list[list[bool]] = [[]]
    while pending:
        course = _Course(pending.pop())
        decision = rule(distributions.tree, distributions, course.accepts)
        pending += course.alternatives()
        if course.weight:
            yield course.weight, decision


def emitted_law(
    rule: Rule, trees: Iterator[tuple[Fraction, DraftTree]], target: Model, draft: Model | None
) -> tuple[dict[Text, Fraction], Fraction]:
    """Probability of every emitted run, and the mean number of accepted drafts."""
    law: dict[Text, Fraction] = defaultdict(Fraction)
    mean = Fraction(0)
    for tree_weight, tree in trees:
        for weight, (path, last) in decisions(rule, ExactDistributions(tree, target, draft)):
            mean += tree_weight * weight * (len(path) - 1)
            before = path_of(tree, path[-1])
            for token_id, prob in enumerate(last.values):
                if prob:
                    law[(*before, token_id)] += tree_weight * weight * prob
    return law, mean


def completed(law: Mapping[Text, Fraction], target: Model, num_tokens: int) -> dict[Text, Fraction]:
    """Probability of every text of ``num_tokens``, runs being continued by the target alone."""
    found: dict[Text, Fraction] = defaultdict(Fraction)
    pending = list(law.items())
    while pending:
        text, weight = pending.pop()
        assert len(text) <= num_tokens
        if len(text) == num_tokens:
            found[text] += weight
        else:
            following = enumerate(target(text).values)
            pending += [((*text, t), weight * prob) for t, prob in following if prob]
    return dict(found)
