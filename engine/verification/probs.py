"""Distributions as tensors, for the rules of ``rejection.py``: what they ask is answered for all requests
of a step at once.

The rules ask for single figures, and every figure that is read off a device makes the engine wait for
it. So a rule is run with what is at hand: the probabilities of drafted tokens, which one transfer brings.
Where it needs more (what a refused draft leaves) the run is given up, its question noted, the questions
of all requests are answered in one go, and the rules of those who asked run once more. They are functions
of figures and noise, so they say the same again up to there. A step waits as often as the unluckiest
request has to ask, and not once per request and refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.tree import DraftTree
from engine.transfer import Readback, read_now, upload
from engine.verification.rejection import Decision, Probs


class NotAtHand(Exception):  # noqa: N818
    """A rule asked for a figure that was not read yet; it has been noted."""


Questions = list["_Derived"]


@dataclass(slots=True, eq=False)
class TensorProbs:
    """A distribution as a tensor ``[vocab_size]`` of any float type, with the entries of drafted tokens
    at hand on the CPU. Whatever is derived is float64, and made once."""

    values: Tensor
    at_hand: Mapping[int, float]
    questions: Questions
    derived: dict[object, _Derived] = field(default_factory=dict)

    def read(self) -> TensorProbs | None:
        """Itself, read already."""
        return self

    def of(self, token_id: int) -> float:
        return self.at_hand[token_id]

    def residual(self, draft: Probs, weight: float = 1.0) -> tuple[float, Probs | None]:
        assert isinstance(draft, TensorProbs | _Derived)
        offered = draft.read()
        assert offered is not None
        found = self._derive(
            (id(offered), weight),
            lambda: (self.values.double() * weight).sub_(offered.values).clamp_(min=0),
        )
        if not found.is_read:
            found.ask()
            return math.nan, found
        return found.mass, found.probs

    def without(self, token_id: int) -> Probs | None:
        found = self._derive(
            token_id,
            lambda: self.values.double().index_fill(0, upload([token_id], self.values.device), 0.0),
        )
        return found.probs if found.is_read else found

    def _derive(self, key: object, masses: Callable[[], Tensor]) -> _Derived:
        found = self.derived.get(key)
        if found is None:
            found = self.derived[key] = _Derived(masses, self.at_hand, self.questions)
        return found


@dataclass(slots=True, eq=False)
class _Derived:
    """The rest of a distribution, normalised; ``probs`` is None where that is nothing. Until it is
    read it can be handed on and not looked into."""

    masses: Callable[[], Tensor]
    token_ids: Mapping[int, float]
    """Those whose probabilities will be asked for."""
    questions: Questions
    is_read: bool = False
    mass: float = math.nan
    probs: TensorProbs | None = None

    def ask(self) -> None:
        if self not in self.questions:
            self.questions.append(self)

    def read(self) -> TensorProbs | None:
        """Raises NotAtHand."""
        if not self.is_read:
            self.ask()
            raise NotAtHand
        return self.probs

    def of(self, token_id: int) -> float:
        found = self.read()
        assert found is not None
        return found.of(token_id)

    def residual(self, draft: Probs, weight: float = 1.0) -> tuple[float, Probs | None]:
        found = self.read()
        assert found is not None
        return found.residual(draft, weight)

    def without(self, token_id: int) -> Probs | None:
        found = self.read()
        assert found is not None
        return found.without(token_id)


def _answer(questions: Questions) -> None:
    """Read what was asked, in one transfer."""
    figures: list[Tensor] = []
    distributions = []
    for each in questions:
        masses = each.masses()
        total = masses.sum()
        masses.div_(total)
        index = upload(list(each.token_ids), masses.device, torch.int64)
        distributions.append(masses)
        figures += [total[None], masses[index]]
    read = iter(_read(torch.cat(figures)))
    for each, values in zip(questions, distributions, strict=True):
        each.mass = next(read)
        at_hand = {token_id: next(read) for token_id in each.token_ids}
        if each.mass > 0:
            each.probs = TensorProbs(values, at_hand, each.questions)
        each.is_read = True
    questions.clear()


@dataclass(frozen=True, slots=True)
class TensorDistributions:
    """One request's rows: ``engine.verification.rejection.Distributions``."""

    targets: list[TensorProbs]
    drafts: Mapping[int, TensorProbs]

    def target(self, row: int) -> TensorProbs:
        return self.targets[row]

    def draft(self, row: int) -> TensorProbs | None:
        return self.drafts.get(row)


def _read(values: Tensor) -> list[Any]:
    return read_now(lambda readback: readback.add(values).tolist)


StepDistributions = tuple[list[TensorDistributions], Questions]


def begin_distributions(
    probs: Tensor, trees: Sequence[DraftTree], readback: Readback
) -> Callable[[], StepDistributions]:
    """Each tree's rows out of ``probs`` ``[num_rows, vocab_size]``, where they follow each other, and the
    list that their rules' questions will come into.

    The probabilities of drafted tokens are read for the target and all drafters at once.
    """
    questions: Questions = []
    targets: list[tuple[Tensor, list[int]]] = []
    drafts: list[tuple[Tensor, list[int]]] = []
    places: list[tuple[int, list[int]]] = []
    for tree in trees:
        children: list[list[int]] = [[] for _ in range(1 + len(tree))]
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            children[parent + 1].append(token_id)
        first = len(targets)
        targets += [(probs[first + row], token_ids) for row, token_ids in enumerate(children)]
        sampled = [row for row, each in enumerate(children) if each and row - 1 in tree.draft_probs]
        drafts += [(_dense(tree.draft_probs[row - 1], probs), children[row]) for row in sampled]
        places.append((first, sampled))
    at_hand = _begin_at_hand([*targets, *drafts], questions, readback)

    def finish() -> StepDistributions:
        made = at_hand()
        own, drafted = made[: len(targets)], iter(made[len(targets) :])
        distributions = [
            TensorDistributions(
                own[first : first + 1 + len(tree)], {row: next(drafted) for row in sampled}
            )
            for tree, (first, sampled) in zip(trees, places, strict=True)
        ]
        return distributions, questions

    return finish


def _begin_at_hand(
    rows: Sequence[tuple[Tensor, list[int]]], questions: Questions, readback: Readback
) -> Callable[[], list[TensorProbs]]:
    """Distributions with the probabilities of these tokens."""
    asked = [(values, token_ids) for values, token_ids in rows if token_ids]
    figures: Callable[[], list[float]] = list
    if asked:
        index = upload([each for _, ids in asked for each in ids], asked[0][0].device)
        parts = index.split([len(ids) for _, ids in asked])
        found = [values[part].double() for (values, _), part in zip(asked, parts, strict=True)]
        figures = readback.add(torch.cat(found)).tolist

    def finish() -> list[TensorProbs]:
        read = iter(figures())
        return [
            TensorProbs(values, {token_id: next(read) for token_id in token_ids}, questions)
            for values, token_ids in rows
        ]

    return finish


def _dense(probs: Any, like: Tensor) -> Tensor:
    """A drafter's distribution as a tensor ``[vocab_size]`` on the target's device."""
    if isinstance(probs, Tensor):
        return probs.to(like.device)
    values = np.zeros(like.shape[1])
    values[list(probs)] = list(probs.values())
    return upload(values, like.device)


def decide(runs: Sequence[Callable[[], Decision]], questions: Questions) -> list[Decision]:
    """The decision of each run of a rule, with all that was asked meanwhile read."""
    decisions: list[Decision | None] = [None] * len(runs)
    waiting = list(range(len(runs)))
    while waiting:
        asking = []
        for index in waiting:
            num_questions = len(questions)
            try:
                decisions[index] = decision = runs[index]()
                if isinstance(decision.last, _Derived):
                    decision.last.ask()
            except NotAtHand:
                pass
            if len(questions) > num_questions:
                asking.append(index)
        waiting = asking
        if questions:
            _answer(questions)
    return [decision for decision in decisions if decision is not None]


def sample_all(last: Sequence[Probs], uniforms: Sequence[float]) -> list[int]:
    """The token at each distribution's quantile; never one of probability 0."""
    rows = []
    for each in last:
        assert isinstance(each, TensorProbs)
        rows.append(each.values.double())
    sums = torch.stack(rows).cumsum(dim=1)
    whole = sums[:, -1]
    at = upload(uniforms, sums.device, torch.float64) * whole
    # The product may round up to the whole, which no sum exceeds.
    at = torch.minimum(at, whole.nextafter(torch.zeros_like(whole)))
    return _read(torch.searchsorted(sums, at[:, None], right=True)[:, 0])
