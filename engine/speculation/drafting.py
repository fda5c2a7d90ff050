"""A request's drafting, checks of what a drafter gives back, and the time that drafters take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from drafters.base import Drafter, DraftRequest, DraftShape
from drafters.containment import guarded
from drafters.tree import EMPTY, DraftTree
from engine.request.params import SpeculativeParams, VerificationName
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.gamma.policy import GammaPolicy
from engine.speculation.parts import Guest, Part

_CORE = "drafters."


@dataclass(slots=True, eq=False)
class Drafting(Part):
    """State of a request that drafts: the part of the drafter that it names, and those of its guests."""

    policy: GammaPolicy
    shape: DraftShape
    guests: list[Guest] = field(default_factory=list)
    seen: DraftTree = EMPTY
    """The last proposal of a greedy request, which has no distributions; its tokens may be stand-ins."""
    has_verified: bool = False
    """A draft of the request was verified."""
    sees_all: bool = False
    """One of its drafters sees every step, asked or not."""

    @property
    def parts(self) -> tuple[Drafting | Guest, ...]:
        return (self, *self.guests)

    @property
    def reader(self) -> Part:
        """The part that reads hidden states, where there is one; there are no two."""
        return next(part for part in self.parts if part.drafter.info.needs.hidden_rows)

    @property
    def is_whole(self) -> bool:
        """Whether drafts are granted whole or not at all."""
        return self.drafter.info.needs.all_or_nothing

    def is_told(self, each: ScheduledRequest) -> bool:
        """Returns whether the drafter hears of this step at once, not when it is asked again: it was
        asked, and has missed none before, or keeps a window of its own that moves with every step."""
        return (each.num_asked > 0 and not self.num_missed) or self.is_whole

    def is_copied(self, each: ScheduledRequest) -> bool:
        """Whether a device can make its draft, and there was one before."""
        if not self.is_asked:
            return True
        copies = self.drafter.copies
        each.copies = guarded([self], copies, each.request.request_id, each.base + 1)
        is_alike = self.shape.width == 1 and each.sampling.is_greedy
        return is_alike and bool(self.seen) and each.copies is not None

    def foresee(self, each: ScheduledRequest) -> None:
        """Proposes what the device may make: all that is known of it is the match before the last."""
        num_nodes = min(len(self.seen), each.num_asked, each.max_depth)
        each.proposal = self.seen.subtree(range(num_nodes))

    def see(self, each: ScheduledRequest) -> None:
        """A step was read."""
        if each.copies is not None and each.num_asked > 0:
            each.proposal, self.seen = each.draft, EMPTY
            if each.draft:
                guarded([self], self._see_copied, each)
            each.reason = each.reason if each.draft else "no_match"
        elif each.num_asked > 0 and each.sampling.is_greedy:
            self.seen = each.proposal

    def _see_copied(self, each: ScheduledRequest) -> None:
        copied = partial(self.drafter.copied, match_length=each.num_matched)
        each.proposal = each.draft = copied(each.draft.token_ids)
        self.seen = copied([0] * each.num_asked)


def drafting_if_any(request: Request) -> Drafting | None:
    """Returns the drafting of a request; None where it asked for no drafter."""
    found: Drafting | None = request.drafting
    return found


def drafting_of(each: ScheduledRequest) -> Drafting:
    """Returns the same of one that drafts."""
    found: Drafting = each.request.drafting
    return found


def shape_of(
    wanted: SpeculativeParams, drafter: Drafter, verification: VerificationName
) -> DraftShape:
    """Returns the shape of a request's drafts. Where it leaves that to the engine, they are trees, of
    which policies take what pays; but chains where they are sampled, since a tree's shape must not depend
    on what was."""
    shape = wanted.shape
    if wanted.tree_strategy != "auto" or verification != "match" or not drafter.info.drafts_trees:
        return shape
    return DraftShape(drafter.auto_width, shape.depth)


def worth_of(drafting: Drafting, tree: DraftTree, wanted: SpeculativeParams) -> Sequence[float]:
    """Returns the survivals of a tree's nodes and, but where a client bounds the share of them that is
    accepted, what their rows teach."""
    survivals, worth = drafting.acceptance.survivals(tree), drafting.drafter.row_worth
    if not worth or wanted.target_acceptance_rate is not None:
        return survivals
    return [survival + worth for survival in survivals]


def is_of_core(drafter: Drafter) -> bool:
    """Whether it is none from outside, and its trees need no check."""
    return type(drafter).__module__.startswith(_CORE)


def check_trees(
    trees: Sequence[DraftTree], asks: Sequence[DraftRequest], vocab_size: int
) -> Sequence[DraftTree]:
    """The trees, one for each request. Raises TypeError or ValueError for anything else."""
    if not isinstance(trees, list | tuple):  # a generator would be used up here
        raise TypeError(f"propose returned a {type(trees).__name__}, not a list of trees")
    for tree, ask in zip(trees, asks, strict=True):
        if not isinstance(tree, DraftTree):
            raise TypeError(f"a {type(tree).__name__} was proposed, not a DraftTree")
        tree.validate(vocab_size)
        if not tree.token_ids:
            continue
        if len(tree) > ask.max_nodes:
            raise ValueError(f"{len(tree)} nodes proposed where {ask.max_nodes} were allowed")
        if max(tree.depths(), default=0) > ask.shape.depth:
            raise ValueError(f"a proposed path is deeper than {ask.shape.depth}")
        check_sampled(tree, ask.sampling.verification, vocab_size)
    return trees


def check_sampled(tree: DraftTree, verification: str, vocab_size: int) -> None:
    """Raises ValueError where the verification could not use the tree, or its ``draft_probs``."""
    if verification == "match":
        return
    if verification == "block" and not tree.is_chain():
        raise ValueError("block verification is for chains, and a tree was proposed")
    for parent, probs in tree.draft_probs.items():
        if not -1 <= parent < len(tree):
            raise ValueError(f"draft_probs of node {parent}, which does not exist")
        shape: Sequence[int] | None = getattr(probs, "shape", None)
        if shape is not None:
            if tuple(shape) != (vocab_size,):
                raise ValueError(f"draft_probs of node {parent} have shape {tuple(shape)}")
        elif min(probs.values(), default=-1) < 0 or abs(sum(probs.values()) - 1) > 1e-3:
            raise ValueError(f"draft_probs of node {parent} are no distribution")
        elif not 0 <= min(probs) <= max(probs) < vocab_size:
            raise ValueError(f"draft_probs of node {parent} name a token out of the vocabulary")


# No generators: a step has five of these, which would take three times as long.


class timed:  # noqa: N801  (reads as a function)
    """The drafters with these names share the time of what is done within."""

    __slots__ = ("_plan", "_names", "_start")

    def __init__(self, plan: Plan, *names: str) -> None:
        self._plan, self._names = plan, names

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = (time.perf_counter() - self._start) / len(self._names)
        spent = self._plan.draft_seconds
        for name in self._names:
            spent[name] = spent.get(name, 0.0) + seconds


class weighed:  # noqa: N801
    """Counts the time of what is done within, less that of drafters, as the engine's own for
    speculation."""

    __slots__ = ("_plan", "_start")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        self._start = time.perf_counter() - sum(self._plan.draft_seconds.values())

    def __exit__(self, *_: object) -> None:
        plan = self._plan
        drafters = sum(plan.draft_seconds.values())
        plan.speculation_seconds += time.perf_counter() - self._start - drafters
