"""``auto``: asks every drafter that costs no forward, and drafts what they together think likeliest.

All members propose at every step. How often each of them is right is learned from the text that
comes, verified or not (full information, as in drafter selection by counterfactual scoring: a
proposal that was not used teaches as much as one that was), so choosing costs no step of the
target. The members' trees are laid over each other; a node's worth is the highest survival that
any of them gives it. A chain is the path of most expected tokens, a tree the likeliest nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from drafters.overlay import Overlay
from drafters.tree import EMPTY, DraftTree

logger = logging.getLogger(__name__)

_FAILURES_BEFORE_SILENCE = 4


@dataclass(slots=True)
class _Member:
    """One member's part in one request."""

    drafter: Drafter
    acceptance: RequestAcceptance
    tree: DraftTree = EMPTY
    num_failures: int = 0

    @property
    def is_asked(self) -> bool:
        return self.num_failures < _FAILURES_BEFORE_SILENCE


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
        self._estimator = AcceptanceEstimator()
        self._states: dict[str, list[_Member]] = {}
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
        salt: str,
    ) -> None:
        """Raises ValueError for options (there are none) and for a request that is already open."""
        self.info.resolve(options)
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        members = self._states[request_id] = []
        for name, drafter in self._members.items():
            member = _Member(drafter, self._estimator.for_request(name))
            members.append(member)
            defaults = drafter.info.defaults()
            if not self._tried(member, drafter.open, request_id, token_ids, defaults, salt):
                member.num_failures = _FAILURES_BEFORE_SILENCE

    def refer(self, request_id: str, reference_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        for member in self._states[request_id]:
            drafter = member.drafter
            if drafter.info.takes_reference and isinstance(drafter, ReferenceDrafter):
                drafter.refer(request_id, reference_token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> DraftTree:
        overlay = Overlay()
        for member in self._states[request.request_id]:
            member.tree = EMPTY
            if member.is_asked:
                self._tried(member, self._ask, member, request)
            if member.tree.token_ids:
                overlay.add(member.tree, member.acceptance.survivals(member.tree))
        shape = request.shape
        depth = min(shape.depth, request.max_nodes)
        if shape.width == 1:
            return overlay.chain(depth)
        return overlay.tree(request.max_nodes, shape.width, depth)

    def _ask(self, member: _Member, request: DraftRequest) -> None:
        (tree,) = member.drafter.propose([request])
        tree.validate()
        member.tree = tree

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for seen in observations:
            for member in self._states[seen.request_id]:
                member.acceptance.label_against(member.tree, seen.emitted_token_ids)
                member.tree = EMPTY
                if member.is_asked:
                    self._tried(member, member.drafter.observe, [seen])

    def num_top_tokens(self, request_id: str) -> int:
        """As many as the member that wants most. Raises KeyError for a request that is not open."""
        asked = [each for each in self._states[request_id] if each.is_asked]
        return max((each.drafter.num_top_tokens(request_id) for each in asked), default=0)

    def close(self, request_id: str) -> None:
        """Forget the request; closing one that is not open does nothing."""
        for member in self._states.pop(request_id, ()):
            self._tried(member, member.drafter.close, request_id)

    def _tried(self, member: _Member, call: Callable[..., None], *args: object) -> bool:
        try:
            call(*args)
        except Exception:
            member.num_failures += 1
            logger.exception("auto: drafter %s failed", member.drafter.info.name)
            return False
        return True
