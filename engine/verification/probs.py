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
from contextlib import suppress
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


Questions = list["TensorProbs"]


@dataclass(slots=True, eq=False)
class TensorProbs:
    """A distribution as a tensor ``[vocab_size]``, normalised if derived from another one. The
    probabilities of ``token_ids``, the ones needed later, come to the CPU when it is read; until then
    it can only be passed on. Derived distributions are float64, and made once."""

    masses: Callable[[], Tensor]
    token_ids: Sequence[int]
    questions: Questions
    values: Tensor | None = None
    """The probabilities, of any float type, once it is read."""
    mass: float = math.nan
    """The sum of ``masses``, where it is derived and read."""
    at_hand: Mapping[int, float] = field(default_factory=dict)
    derived: dict[object, TensorProbs] = field(default_factory=dict)

    def look(self) -> Tensor:
        """Returns its probabilities. Raises NotAtHand where they were not read yet."""
        if self.values is None:
            self.ask()
            raise NotAtHand
        return self.values

    def ask(self) -> None:
        if self not in self.questions:
            self.questions.append(self)

    def of(self, token_id: int) -> float:
        self.look()
        return self.at_hand[token_id]

    def residual(self, draft: Probs, weight: float = 1.0) -> tuple[float, Probs | None]:
        assert isinstance(draft, TensorProbs)
        values, offered = self.look(), draft.look()
        rest = self._derive(
            (id(draft), weight),
            lambda: (values.double() * weight).sub_(offered).clamp_(min=0),
        )
        if rest.values is None:
            rest.ask()
        return rest.mass, rest.unless_empty()

    def without(self, token_id: int) -> Probs | None:
        values = self.look()
        rest = self._derive(
            token_id,
            lambda: values.double().index_fill(0, upload([token_id], values.device), 0.0),
        )
        return rest.unless_empty()

    def unless_empty(self) -> TensorProbs | None:
        """None where it was read, and is nothing."""
        return self if self.values is None or self.mass > 0 else None

    def _derive(self, key: object, masses: Callable[[], Tensor]) -> TensorProbs:
        if key not in self.derived:
            self.derived[key] = TensorProbs(masses, self.token_ids, self.questions)
        return self.derived[key]


def _answer(questions: Questions) -> None:
    """Read what was asked, in one transfer."""
    figures: list[Tensor] = []
    for each in questions:
        masses = each.masses()
        total = masses.sum()
        each.values = masses.div_(total)
        index = upload(each.token_ids, masses.device, torch.int64)
        figures += [total[None], each.values[index]]
    read = iter(_read(torch.cat(figures)))
    for each in questions:
        each.mass = next(read)
        each.at_hand = {token_id: next(read) for token_id in each.token_ids}
    questions.clear()


@dataclass(frozen=True, slots=True)
class TensorDistributions:
    """One request's rows: ``engine.verification.rejection.Distributions``."""

    targets: Sequence[TensorProbs]
    drafts: Mapping[int, TensorProbs]

    def target(self, row: int) -> TensorProbs:
        return self.targets[row]

    def draft(self, row: int) -> TensorProbs | None:
        return self.drafts.get(row)


def _read(values: Tensor) -> list[Any]:
    return read_now(lambda readback: readback.add(values).tolist)


def begin_distributions(
    probs: Tensor, trees: Sequence[DraftTree], readback: Readback
) -> Callable[[], tuple[list[TensorDistributions], Questions]]:
    """Each tree's rows out of ``probs`` ``[num_rows, vocab_size]``, where they follow each other, and the
    list that their rules' questions will come into.

    The probabilities of drafted tokens are read for the target and all drafters at once.
    """
    questions: Questions = []
    rows: list[TensorProbs] = []

    def made(values: Tensor, token_ids: Sequence[int]) -> TensorProbs:
        rows.append(TensorProbs(lambda: values, token_ids, questions, values))
        return rows[-1]

    distributions = []
    target = iter(probs)
    for tree in trees:
        children: list[list[int]] = [[] for _ in range(1 + len(tree))]
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            children[parent + 1].append(token_id)
        targets = [made(next(target), token_ids) for token_ids in children]
        drafts = {
            row: made(_dense(tree.draft_probs[row - 1], probs), token_ids)
            for row, token_ids in enumerate(children)
            if token_ids and row - 1 in tree.draft_probs
        }
        distributions.append(TensorDistributions(targets, drafts))
    figures = _begin_figures(rows, readback)

    def finish() -> tuple[list[TensorDistributions], Questions]:
        read = iter(figures())
        for each in rows:
            each.at_hand = {token_id: next(read) for token_id in each.token_ids}
        return distributions, questions

    return finish


def _begin_figures(rows: Sequence[TensorProbs], readback: Readback) -> Callable[[], list[float]]:
    """The probabilities of these distributions' tokens, one after another."""
    asked = [each for each in rows if each.token_ids]
    if not asked:
        return list
    token_ids = [token_id for each in asked for token_id in each.token_ids]
    parts = upload(token_ids, asked[0].look().device).split([len(each.token_ids) for each in asked])
    found = [each.look()[part].double() for each, part in zip(asked, parts, strict=True)]
    return readback.add(torch.cat(found)).tolist


def _dense(probs: Any, like: Tensor) -> Tensor:
    """A drafter's distribution as a tensor ``[vocab_size]`` on the target's device."""
    if isinstance(probs, Tensor):
        return probs.to(like.device)
    values = np.zeros(like.shape[1])
    values[list(probs)] = list(probs.values())
    return upload(values, like.device)


def decide(runs: Sequence[Callable[[], Decision]], questions: Questions) -> list[Decision]:
    """The decision of each run of a rule, with all that was asked meanwhile read."""
    decisions: dict[int, Decision] = {}
    waiting = list(range(len(runs)))
    while waiting:
        asking = []
        for index in waiting:
            num_questions = len(questions)
            with suppress(NotAtHand):
                decisions[index] = runs[index]()
                _values(decisions[index].last)
            if len(questions) > num_questions:
                asking.append(index)
        waiting = asking
        if questions:
            _answer(questions)
    return [decisions[index] for index in range(len(runs))]


def sample_all(last: Sequence[Probs], uniforms: Sequence[float]) -> list[int]:
    """The token at each distribution's quantile; never one of probability 0."""
    sums = torch.stack([_values(each).double() for each in last]).cumsum(dim=1)
    whole = sums[:, -1]
    at = upload(uniforms, sums.device, torch.float64) * whole
    # The product may round up to the whole, which no sum exceeds.
    at = torch.minimum(at, whole.nextafter(torch.zeros_like(whole)))
    return _read(torch.searchsorted(sums, at[:, None], right=True)[:, 0])


def _values(probs: Probs) -> Tensor:
    assert isinstance(probs, TensorProbs)
    return probs.look()
