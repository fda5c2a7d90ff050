"""A drafter that is right as often as the measured one, for synthetic texts."""

from __future__ import annotations

from collections.abc import Mapping

from drafters.base import Drafter, DrafterInfo, DraftRequest, NewRequest, RequestState
from drafters.tree import EMPTY, DraftTree, chain
from slipstream.tools.simulate.profile import Kind
from slipstream.tools.simulate.work import NEVER_WRITTEN, Work


class MeasuredDrafter(Drafter):
    """Proposes chains. ``works``: the open requests by id, live."""

    info = DrafterInfo("measured", "Right as often as was measured.", drafts_trees=False)

    def __init__(self, works: Mapping[str, Work], kinds: Mapping[str, Kind]) -> None:
        super().__init__()
        self._works = works
        self._kinds = kinds

    def start(self, request: NewRequest) -> _Chains:
        work = self._works[request.request_id]
        return _Chains(work, self._kinds[work.kind], len(request.token_ids))


class _Chains(RequestState):
    """One request's drafts."""

    def __init__(self, work: Work, kind: Kind, num_prompt: int) -> None:
        self._text = work.completion_token_ids
        self._luck = work.luck()
        self._kind = kind
        self._num_prompt = num_prompt

    def propose(self, request: DraftRequest) -> DraftTree:
        start = len(request.token_ids) - self._num_prompt
        num_nodes = request.depth
        if num_nodes < 1 or self._luck[start][0] >= self._kind.offered:
            return EMPTY
        text = self._text[start : start + num_nodes]
        right = 0
        while right < len(text) and self._luck[start + right][1] < self._at(right):
            right += 1
        token_ids = [*text[:right], *[NEVER_WRITTEN] * (num_nodes - right)]
        return chain(token_ids, range(num_nodes))

    def _at(self, depth: int) -> float:
        acceptance = self._kind.acceptance
        return acceptance[min(depth, len(acceptance) - 1)] if acceptance else 0.0
