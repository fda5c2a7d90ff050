"""``auto``: asks every drafter that costs no forward, and drafts what they together think likeliest.

Members are the drafters that need nothing of the engine but token ids and top tokens, those of other
distributions among them, and beside them what the target nearly said last (``last_top.py``). Whether a
member is right is learned from the text that comes, whether its proposal was used or not, so choosing
costs no step of the target. Two things are learned: how likely a member's node is, by its feature
(``RequestAcceptance``), and which members to believe, by exponential weights under full information, as
in HedgeSpec (Liu et al., arXiv 2510.20064). Members that proposed nothing keep their weight (Freund et
al., STOC 1997).

The members' trees are laid over each other; a node's worth is the highest weighted survival that any of
them gives it. For a tree all members propose. For a chain they are asked in the order of their weights,
until one of them fills it with tokens that are as good as certain; a member that of late added nothing
is left out. All are asked in every ``_ASKED_EVERY``-th step, so that a member whose time has come is
noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp
from operator import attrgetter

from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DrafterUnavailableError,
    DraftRequest,
    NewRequest,
    Observation,
    RequestState,
    drafter,
)
from drafters.checks import count_of, is_interrupt
from drafters.estimator import AcceptanceEstimator, RequestAcceptance
from drafters.last_top import LastTopDrafter
from drafters.tree import EMPTY, ROOT, DraftTree, TreeBuilder, chain

logger = logging.getLogger(__name__)

_NO_MEMBERS = ("none", "grammar", "auto")
"""Two propose nothing, one asks all others."""
_FAILURES_BEFORE_SILENCE = 4
_ASKED_EVERY = 8
_CERTAIN = 0.8
"""Expected share of a chain that is accepted, from which nobody else is asked."""
_LEAST_GAIN = 0.01
"""Tokens per step that a member has to add to those asked before it."""
_FIRST_GAIN = 0.5
_GAIN_WEIGHT = 0.04
"""The weight of the newest step in these averages."""
_RATE = 1.0
_DECAY = 0.9
"""The decay of charges per step in which all were asked: about the last ten count."""
_LEAST_WEIGHT = 0.05
"""Nobody counts less: what it says of its own nodes is calibrated."""
_NEARLY_SAID = 0.1
"""The first belief in tokens that the target nearly said."""
_NUM_VALUES = 16
_MOST_AGREEING = 4


@dataclass(slots=True)
class _Member:
    """One member's part in one request."""

    drafter: Drafter
    acceptance: RequestAcceptance
    tree: DraftTree = EMPTY
    num_failures: int = 0
    was_asked: bool = False
    charge: float = 0.0
    """Discounted sum of what it had accepted less than the best of those asked, as shares of a draft's
    depth."""
    gain: float = _FIRST_GAIN
    """Tokens per step that it got right, of late, and that members asked before it did not."""

    @property
    def weight(self) -> float:
        """1 for one that was never behind the best."""
        return max(_LEAST_WEIGHT, exp(-_RATE * self.charge))

    @property
    def is_asked(self) -> bool:
        return self.num_failures < _FAILURES_BEFORE_SILENCE


@dataclass(slots=True)
class _Members(RequestState):
    """One request. ``members`` are in the order in which they are asked; ``depth`` is that of the draft
    asked for last."""

    members: list[_Member]
    num_steps: int = 0
    depth: int = 1


@drafter
class AutoDrafter(Drafter):
    """See the module. A member that raises is left out, first for a step, then for the request."""

    info = DrafterInfo(
        "auto",
        "Lays the drafts of all drafters that need no model, and what the target nearly said, over each "
        "other and takes what is likeliest, by how often each of them has been right about this text.",
        cost="The CPU time of its members together; no model.",
    )

    def __init__(self, members: Mapping[str, Drafter], vocab_size: int = 0) -> None:
        """``vocab_size`` as in ``DraftTree.validate``. Raises ValueError without members, or with one
        that needs more than token ids and top tokens."""
        super().__init__()
        if not members:
            raise ValueError("auto needs at least one drafter to choose from")
        if not all(can_join(each.info) for each in members.values()):
            raise ValueError("auto chooses among drafters that need no model and no window")
        self._members = dict(members)
        self._vocab_size = vocab_size
        self._last_top = LastTopDrafter()
        # Counts of hits and misses, no texts: they serve all requests and tenants.
        self.estimator = AcceptanceEstimator()
        self._nearly_said = AcceptanceEstimator(initial=_NEARLY_SAID)
        self._describe()

    def _describe(self) -> None:
        infos = [each.info for each in self._members.values()]
        self.info = replace(
            type(self).info,
            needs=DrafterNeeds(top_probs=any(each.needs.top_probs for each in infos)),
            takes_prediction=any(each.takes_prediction for each in infos),
        )

    @classmethod
    def build(cls, context: DrafterContext) -> AutoDrafter:
        """Returns it over drafters of its own, of all kinds of the core that can be members and work
        here; of two of which one does all that the other does, that one."""
        members: dict[str, Drafter] = {}
        for name, kind in REGISTERED.items():
            if can_join(kind.info) and not kind.part_of:
                with suppress(DrafterUnavailableError):  # the registry says which and why
                    members[name] = kind.build(context)
        return cls(members, context.vocab_size)

    def meet(self, drafters: Mapping[str, Drafter]) -> None:
        """Those of other distributions become members as they are."""
        self._members |= {
            name: each
            for name, each in drafters.items()
            if name not in REGISTERED and can_join(each.info)
        }
        self._describe()

    def start(self, request: NewRequest) -> _Members:
        request_id, token_ids = request.request_id, request.token_ids
        prior = self.estimator.for_request
        members = [_Member(each, prior(name)) for name, each in self._members.items()]
        nearly_said = self._nearly_said.for_request(self._last_top.info.name)
        members.append(_Member(self._last_top, nearly_said))
        for member in members:
            options, begin = member.drafter.info.defaults(), member.drafter.open
            if not self._tried(member, begin, request_id, token_ids, options, request.cache_salt):
                member.num_failures = _FAILURES_BEFORE_SILENCE
        return _Members(members)

    def predict(self, request_id: str, prediction_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        for member in self._states[request_id].members:
            if member.drafter.info.takes_prediction:
                self._tried(member, member.drafter.predict, request_id, prediction_token_ids)

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        """One member after the other; those that have read all are asked already."""
        num_read = 0
        for member in self._states[request_id].members:
            if member.is_asked and (num_read < num_tokens or not num_tokens):
                left, read = num_tokens - num_read, member.drafter.read_prompt
                num_read += self._counted(member, left, read, request_id, left)
        return num_read

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> DraftTree:
        state, shape = self._states[request.request_id], request.shape
        depth = request.depth
        is_chain = shape.width == 1
        asks_all = not is_chain or state.num_steps % _ASKED_EVERY == 0
        state.num_steps += 1
        state.depth = depth
        found: list[tuple[_Member, list[float]]] = []
        is_certain = False
        for member in state.members:
            member.tree = EMPTY
            wanted = asks_all or (not is_certain and member.gain >= _LEAST_GAIN)
            member.was_asked = wanted and member.is_asked
            if member.was_asked:
                self._tried(member, self._ask, member, request)
            if member.tree.token_ids:
                survivals = member.acceptance.survivals(member.tree)
                found.append((member, survivals))
                is_certain |= is_chain and sum(survivals) >= _CERTAIN * depth
        if is_chain and len(found) == 1 and found[0][0].tree.is_chain():
            return alone(found[0][0].tree, found[0][1], depth)
        overlay = Overlay()
        most = max((member.weight for member, _ in found), default=1.0)
        for member, survivals in found:
            weight = member.weight / most
            overlay.lay(member.tree, [weight * each for each in survivals])
        if is_chain:
            return overlay.chain(depth)
        return overlay.tree(request.max_nodes, shape.width, depth)

    def _ask(self, member: _Member, request: DraftRequest) -> None:
        (tree,) = member.drafter.propose([request])
        # Here it costs this member's draft; found in what all have drafted it would cost everybody's.
        tree.validate(self._vocab_size)
        member.tree = tree

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for seen in observations:
            state = self._states[seen.request_id]
            _rate(state.members, seen.emitted_token_ids, state.depth)
            for member in state.members:
                member.acceptance.label_against(member.tree, seen.emitted_token_ids)
                member.tree = EMPTY
                if member.is_asked:
                    self._tried(member, member.drafter.observe, [seen])
            state.members.sort(key=_charge)

    def num_top_tokens(self, request_id: str) -> int:
        """As many as the member that wants most. Raises KeyError for a request that is not open."""
        most = 0
        for each in self._states[request_id].members:
            if each.is_asked:
                most = max(most, self._counted(each, None, each.drafter.num_top_tokens, request_id))
        return most

    def finish(self, request_id: str, state: _Members) -> None:
        for member in state.members:
            self._tried(member, member.drafter.close, request_id)

    def _tried(self, member: _Member, call: Callable[..., None], *args: object) -> bool:
        try:
            call(*args)
        except BaseException as error:
            if is_interrupt(error):
                raise
            member.num_failures += 1
            logger.exception("auto: drafter %s failed", member.drafter.info.name)
            return False
        return True

    def _counted(
        self, member: _Member, most: int | None, call: Callable[..., object], *args: object
    ) -> int:
        """Returns the result of ``call`` if it is a number up to ``most``; otherwise it has failed: 0."""
        found = [0]
        self._tried(member, lambda: found.append(count_of(call(*args), most)))
        return found[-1]


_charge = attrgetter("charge")


def can_join(info: DrafterInfo) -> bool:
    """Whether a drafter may be a member of ``auto``."""
    needs = info.needs
    needs_more = needs.hidden_rows or needs.draft_slots or needs.all_or_nothing or needs.draft_model
    return info.name not in _NO_MEMBERS and not needs_more


def _rate(members: Sequence[_Member], emitted_token_ids: Sequence[int], depth: int) -> None:
    """Counts what those asked added to those asked before them; where all were asked, charges those that
    proposed something for what the best of them had accepted and they had not."""
    right: list[tuple[_Member, int]] = []
    knows_all = all(member.was_asked for member in members if member.is_asked)
    most = 0
    for member in members:
        if member.was_asked:
            num_right = len(member.tree.follow(emitted_token_ids))
            member.gain += _GAIN_WEIGHT * (max(0, num_right - most) - member.gain)
            most = max(most, num_right)
            member.was_asked = False
            if member.tree.token_ids:
                right.append((member, num_right))
    if knows_all:
        for member, num_right in right:
            member.charge = _DECAY * member.charge + (most - num_right) / max(1, depth)


def overlay_feature(acceptance: float, num_agreeing: int) -> int:
    """Returns the bucket of (believed chance of the node given its parent, trees that hold it): 0..63."""
    value = min(_NUM_VALUES - 1, int(acceptance * _NUM_VALUES))
    return value * _MOST_AGREEING + min(num_agreeing, _MOST_AGREEING) - 1


def alone(tree: DraftTree, survivals: Sequence[float], depth: int) -> DraftTree:
    """Returns what ``Overlay.chain`` makes of one chain that nothing else is laid over."""
    num_nodes = min(depth, len(tree.token_ids))
    features = []
    above = 1.0
    for worth in survivals[:num_nodes]:
        features.append(overlay_feature(worth / above if above > 0 else 0.0, 1))
        above = worth
    return chain(tree.token_ids[:num_nodes], features)


class Overlay(TreeBuilder):
    """The union of trees. A node is worth the highest survival that one of its trees gives it."""

    __slots__ = ("_num_agreeing",)

    def __init__(self) -> None:
        super().__init__()
        self._num_agreeing: list[int] = []

    def lay(self, tree: DraftTree, survivals: Sequence[float]) -> None:
        """``survivals[i]`` is node i's, never more than its parent's."""
        placed: list[int] = []
        for token_id, parent, survival in zip(tree.token_ids, tree.parents, survivals, strict=True):
            node = self.add(ROOT if parent == ROOT else placed[parent], token_id, 0, survival)
            if node == len(self._num_agreeing):
                self._num_agreeing.append(0)
            self._num_agreeing[node] += 1
            placed.append(node)

    def chain(self, depth: int) -> DraftTree:
        """Returns the path of at most ``depth`` nodes with the most expected tokens."""
        children = self._ranked(range(len(self)), depth)
        path: list[int] = []
        node = ROOT
        while len(path) < depth and node in children:
            node = children[node][-1]
            path.append(node)
        return self._take(path)

    def tree(self, num_nodes: int, width: int, depth: int) -> DraftTree:
        """Returns the likeliest nodes, at most ``width`` under one parent: the best chain comes first,
        and under each node the child that promises most."""
        children = self._ranked(self.chosen(num_nodes, width, depth), depth)
        ordered: list[int] = []
        stack = children.get(ROOT, [])
        while stack:
            ordered.append(stack.pop())
            stack += children.get(ordered[-1], ())
        return self._take(ordered)

    def _ranked(self, nodes: Sequence[int], depth: int) -> dict[int, list[int]]:
        """Returns the children of each node; the last one is that of which most tokens are expected, down
        to ``depth``, the first added among equals."""
        gains = self._gains(depth)
        children: dict[int, list[int]] = {}
        for node in nodes:
            children.setdefault(self.parents[node], []).append(node)
        for siblings in children.values():
            siblings.sort(key=lambda node: (gains[node], -node))
        return children

    def _gains(self, depth: int) -> list[float]:
        """Returns, per node, the expected tokens of the best path through it, down to ``depth``."""
        below = [0.0] * len(self)
        gains = [0.0] * len(self)
        for node in range(len(self) - 1, -1, -1):  # children before their parents
            if self.depths[node] > depth:
                continue
            gains[node] = self.weights[node] + below[node]
            parent = self.parents[node]
            if parent != ROOT and gains[node] > below[parent]:
                below[parent] = gains[node]
        return gains

    def _take(self, nodes: Sequence[int]) -> DraftTree:
        for node in nodes:
            parent = self.parents[node]
            above = 1.0 if parent == ROOT else self.weights[parent]
            acceptance = self.weights[node] / above if above > 0 else 0.0
            self.features[node] = overlay_feature(acceptance, self._num_agreeing[node])
        return self.take(nodes)
