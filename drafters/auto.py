"""``auto``: asks every drafter that costs no forward, and drafts what they together think likeliest.

How often each member is right is learned from the text that comes, verified or not (full
information, as in drafter selection by counterfactual scoring: a proposal that was not used teaches
as much as one that was), so choosing costs no step of the target. The members' trees are laid over
each other; a node's worth is the highest survival that any of them gives it. A chain is the path of
most expected tokens, a tree the likeliest nodes.

For a tree all members propose. For a chain they are asked one after the other, who was right most
first, until one of them fills it with tokens that are as good as certain; who of late added
nothing to what those before it knew is left out. All are asked in every ``_ASKED_EVERY``-th step,
so that a member whose time has come is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterNeeds,
    DraftRequest,
    Observation,
    OptionValue,
    ReferenceDrafter,
)
from drafters.estimator import AcceptanceEstimator, RequestAcceptance
from drafters.overlay import Overlay, alone
from drafters.tree import EMPTY, ROOT, DraftTree

logger = logging.getLogger(__name__)

_FAILURES_BEFORE_SILENCE = 4
_ASKED_EVERY = 16
_CERTAIN = 0.8
"""Expected share of a chain that is accepted, from which nobody else is asked."""
_LEAST_GAIN = 0.01
"""Tokens per step that a member has to add to those asked before it."""
_FIRST_GAIN = 0.5
_GAIN_WEIGHT = 0.04
"""Of the newest step in these averages."""


@dataclass(slots=True)
class _Member:
    """One member's part in one request."""

    drafter: Drafter
    acceptance: RequestAcceptance
    tree: DraftTree = EMPTY
    num_failures: int = 0
    was_asked: bool = False
    num_right: float = _FIRST_GAIN
    """Tokens per step that it got right, of late, while it was asked."""
    gain: float = _FIRST_GAIN
    """Of these, those that members asked before it did not."""

    @property
    def is_asked(self) -> bool:
        return self.num_failures < _FAILURES_BEFORE_SILENCE


@dataclass(slots=True)
class _State:
    """One request. ``members`` are in the order in which they are asked."""

    members: list[_Member]
    num_steps: int = 0


class AutoDrafter:
    """See the module. A member that raises is left out, first for a step, then for the request."""

    def __init__(self, members: Mapping[str, Drafter]) -> None:
        """Raises ValueError without members, or with one that needs more than token ids and top
        tokens."""
        if not members:
            raise ValueError("auto needs at least one drafter to choose from")
        needs = [member.info.needs for member in members.values()]
        if any(each.hidden_rows or each.draft_slots or each.whole_trees for each in needs):
            raise ValueError("auto chooses among drafters that need no model and no window")
        self._members = dict(members)
        # Counts of hits and misses, no texts: they serve all requests and tenants.
        self.estimator = AcceptanceEstimator()
        self._states: dict[str, _State] = {}
        self.info = DrafterInfo(
            name="auto",
            description=(
                f"Lays the drafts of {', '.join(members)} over each other and takes what is "
                "likeliest, by how often each of them has been right about this text."
            ),
            drafts_trees=True,
            needs=DrafterNeeds(top_probs=any(each.top_probs for each in needs)),
            cost="The CPU time of its members together; no model.",
            takes_reference=any(each.info.takes_reference for each in members.values()),
        )

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None:
        """Raises ValueError for options (there are none) and for a request that is already open."""
        self.info.resolve(options)
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        members: list[_Member] = []
        self._states[request_id] = _State(members)
        for name, drafter in self._members.items():
            member = _Member(drafter, self.estimator.for_request(name))
            members.append(member)
            defaults = drafter.info.defaults()
            if not self._tried(member, drafter.open, request_id, token_ids, defaults, cache_salt):
                member.num_failures = _FAILURES_BEFORE_SILENCE

    def refer(self, request_id: str, reference_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        for member in self._states[request_id].members:
            drafter = member.drafter
            if drafter.info.takes_reference and isinstance(drafter, ReferenceDrafter):
                drafter.refer(request_id, reference_token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> DraftTree:
        state, shape = self._states[request.request_id], request.shape
        depth = min(shape.depth, request.max_nodes)
        is_chain = shape.width == 1
        asks_all = not is_chain or state.num_steps % _ASKED_EVERY == 0
        state.num_steps += 1
        found: list[tuple[DraftTree, list[float]]] = []
        is_certain = False
        for member in state.members:
            member.tree = EMPTY
            wanted = asks_all or (not is_certain and member.gain >= _LEAST_GAIN)
            member.was_asked = wanted and member.is_asked
            if member.was_asked:
                self._tried(member, self._ask, member, request)
            if member.tree.token_ids:
                survivals = member.acceptance.survivals(member.tree)
                found.append((member.tree, survivals))
                is_certain |= is_chain and sum(survivals) >= _CERTAIN * depth
        if is_chain and len(found) == 1 and found[0][0].is_chain():
            return alone(*found[0], depth)
        overlay = Overlay()
        for tree, survivals in found:
            overlay.add(tree, survivals)
        return (
            overlay.chain(depth)
            if is_chain
            else overlay.tree(request.max_nodes, shape.width, depth)
        )

    def _ask(self, member: _Member, request: DraftRequest) -> None:
        (tree,) = member.drafter.propose([request])
        tree.validate()
        member.tree = tree

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for seen in observations:
            state = self._states[seen.request_id]
            _rate(state.members, seen.emitted_token_ids)
            for member in state.members:
                member.acceptance.label_against(member.tree, seen.emitted_token_ids)
                member.tree = EMPTY
                if member.is_asked:
                    self._tried(member, member.drafter.observe, [seen])
            state.members.sort(key=_num_right, reverse=True)

    def num_top_tokens(self, request_id: str) -> int:
        """As many as the member that wants most. Raises KeyError for a request that is not open."""
        asked = [each for each in self._states[request_id].members if each.is_asked]
        return max((each.drafter.num_top_tokens(request_id) for each in asked), default=0)

    def close(self, request_id: str) -> None:
        """Forget the request; closing one that is not open does nothing."""
        state = self._states.pop(request_id, None)
        for member in state.members if state is not None else ():
            self._tried(member, member.drafter.close, request_id)

    def _tried(self, member: _Member, call: Callable[..., None], *args: object) -> bool:
        try:
            call(*args)
        except Exception:
            member.num_failures += 1
            logger.exception("auto: drafter %s failed", member.drafter.info.name)
            return False
        return True


_num_right = attrgetter("num_right")


def _rate(members: Sequence[_Member], emitted_token_ids: Sequence[int]) -> None:
    """Count what those asked got right, and what they added to those asked before them."""
    most = 0
    for member in members:
        if member.was_asked:
            num_right = _num_followed(member.tree, emitted_token_ids)
            member.num_right += _GAIN_WEIGHT * (num_right - member.num_right)
            member.gain += _GAIN_WEIGHT * (max(0, num_right - most) - member.gain)
            most = max(most, num_right)
            member.was_asked = False


def _num_followed(tree: DraftTree, emitted_token_ids: Sequence[int]) -> int:
    """How many of the emitted tokens a path of the tree foresaw."""
    node, depth = ROOT, 0
    for index, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        if depth == len(emitted_token_ids):
            break
        if parent == node and token_id == emitted_token_ids[depth]:
            node, depth = index, depth + 1
    return depth
