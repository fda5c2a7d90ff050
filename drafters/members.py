"""The members of ``auto`` in one request: who is asked, told and believed.

Owned by ``auto``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from operator import attrgetter

from drafters.base import Drafter, Observation, RequestState
from drafters.checks import count_of, is_interrupt
from drafters.estimator import RequestAcceptance
from drafters.ledger import Gain as HeadGain
from drafters.standing import Gain, Trials
from drafters.tree import EMPTY, DraftTree

logger = logging.getLogger(__name__)

FAILURES_BEFORE_SILENCE = 4
_RATE = 1.0
_DECAY = 0.9
"""The decay of charges per step in which all were asked: about the last ten count."""
_LEAST_WEIGHT = 0.05
"""Nobody counts less: what it says of its own nodes is calibrated."""


@dataclass(slots=True, eq=False)
class Member:
    """One member's part in one request. ``is_trusted``: its trees need no check."""

    drafter: Drafter
    acceptance: RequestAcceptance
    gain: Gain
    is_trusted: bool = False
    tree: DraftTree = EMPTY
    num_failures: int = 0
    is_awake: bool = True
    was_asked: bool = False
    num_missed: int = 0
    """Tokens at the end of the text that it was not told of, since it slept."""
    seconds: float = 0.0
    """What it took in this step."""
    tried_at: int = -1
    """The step of its request in which it was last woken."""
    charge: float = 0.0
    """Discounted sum of what it had accepted less than the best of those asked, as shares of a draft's
    depth."""

    @property
    def weight(self) -> float:
        """1 for one that was never behind the best."""
        return max(_LEAST_WEIGHT, exp(-_RATE * self.charge))

    @property
    def is_asked(self) -> bool:
        return self.num_failures < FAILURES_BEFORE_SILENCE

    def count(self, num_added: int) -> None:
        """It was asked, and got so many tokens right that those asked before it did not."""
        self.gain.add(num_added)

    def wake(self) -> None:
        """Something is expected of it in this request."""
        self.is_awake = True
        self.gain.hope()

    def view(self, seen: Observation) -> Observation:
        """Returns what its drafter is told of a step."""
        return seen

    def catch_up(self, request_id: str, text: Sequence[int]) -> None:
        """Its drafter hears of what it missed, as one long draft that was accepted."""
        num_missed, self.num_missed = self.num_missed, 0
        if num_missed:
            seen = Observation.of_missed(request_id, text, num_missed)
            tried((self,), self.drafter.observe, [seen])


@dataclass(slots=True, eq=False)
class HeadMember(Member):
    """The head's part in one request. ``num_free``: the tokens that free drafts were expected to bring
    in this step."""

    added: HeadGain = field(kw_only=True)
    num_free: float = 0.0

    def count(self, num_added: int) -> None:
        """Drafts that it could not make say nothing of those that it can."""
        if self.tree.token_ids:
            self.added.observe(num_added, self.num_free)

    def view(self, seen: Observation) -> Observation:
        """Of its own draft what the text has reached, as if that had been verified: it learns by features
        of its own."""
        emitted = seen.emitted_token_ids
        depths = self.tree.depths()
        tree = self.tree.subtree([at for at, depth in enumerate(depths) if depth <= len(emitted)])
        path = [0, *(node + 1 for node in tree.follow(emitted))]
        said = [-1] * (len(tree) + 1)
        for row, token_id in zip(path, emitted, strict=False):
            said[row] = token_id
        return Observation(seen.request_id, seen.token_ids, tree, said, path, emitted)


@dataclass(slots=True)
class MemberStates(RequestState):
    """One request. ``members`` are in the order in which they are asked; ``depth`` and
    ``tokens_per_second`` are those of the draft asked for last."""

    members: list[Member]
    token_ids: Sequence[int]
    head: HeadMember | None = None
    num_steps: int = 0
    depth: int = 1
    tokens_per_second: float = 0.0

    @property
    def everyone(self) -> Sequence[Member]:
        return self.members if self.head is None else [*self.members, self.head]

    @property
    def asked(self) -> Sequence[Member]:
        """The members, and the head where it was asked in this step."""
        return self.everyone if self.head is not None and self.head.was_asked else self.members

    def send_to_sleep(self, tokens_per_second: float) -> None:
        """Those who do not earn their time go to sleep, all but the best of those who are awake."""
        awake = [each for each in self.members if each.is_awake and each.is_asked]
        if len(awake) < 2:
            return
        best = max(awake, key=lambda each: each.gain.tokens)
        for member in awake:
            gain = member.gain
            if member is not best and gain.tokens < gain.standing.price(tokens_per_second):
                member.is_awake = False

    def woken(self, trials: Trials) -> Member | None:
        """Wakes the one whose last trial is longest ago, where a trial is due."""
        sleeping = [each for each in self.members if not each.is_awake and each.is_asked]
        if not sleeping:
            return None
        member = min(sleeping, key=attrgetter("tried_at"))
        # What it missed it has to hear of at the end in any case.
        if not trials.allow(member.gain.standing.price(self.tokens_per_second)):
            return None
        member.is_awake, member.tried_at = True, self.num_steps
        # Behind all others, since what counts is what it adds to them.
        self.members.remove(member)
        self.members.append(member)
        return member


def rate(members: Sequence[Member], emitted_token_ids: Sequence[int], depth: int) -> bool:
    """Counts what those asked added to those asked before them, and charges those that proposed something
    for what the best of them had accepted and they had not. Returns whether there were two of these: of
    those who were not asked nobody knows how they would have done."""
    right: list[tuple[Member, int]] = []
    most = 0
    for member in members:
        if member.was_asked:
            member.was_asked = False
            num_right = 0
            if member.tree.token_ids:
                num_right = len(member.tree.follow(emitted_token_ids))
                right.append((member, num_right))
            member.count(max(0, num_right - most))
            most = max(most, num_right)
    if len(right) < 2:
        return False
    for member, num_right in right:
        member.charge = _DECAY * member.charge + (most - num_right) / max(1, depth)
    return True


def tried(blamed: Sequence[Member], call: Callable[..., object], *args: object) -> bool:
    """Returns whether the call came back; where it raised, these have failed."""
    try:
        call(*args)
    except BaseException as error:
        if is_interrupt(error):
            raise
        for member in blamed:
            member.num_failures += 1
        name = blamed[0].drafter.info.name if blamed else "of several requests"
        logger.exception("auto: drafter %s failed", name)
        return False
    return True


def counted(
    blamed: Sequence[Member],
    most: int | None,
    call: Callable[..., object],
    *args: object,
    otherwise: int = 0,
) -> int:
    """Returns the result of ``call`` if it is a number up to ``most``; otherwise these have failed."""
    found = [otherwise]
    tried(blamed, lambda: found.append(count_of(call(*args), most)))
    return found[-1]
