"""Tokens that the target nearly said: the likeliest beside the anchor, as candidates for the next token.

After LogitSpec (Liu et al., arXiv 2507.01449): a token that nearly came at one place often comes at the
next. Each goes on with what followed it the last time it stood in the text. Owned by ``auto``, whose
other members ask for the top tokens: alone, it would guess one token where others copy ten.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Drafter, DrafterInfo, DraftRequest, NewRequest, Observation, RequestState
from drafters.tree import EMPTY, ROOT, DraftTree, TreeBuilder

MAX_CANDIDATES = 8
_SEARCHED_TOKENS = 1_024
"""The part of the text's end that is searched for what followed a candidate."""
_MAX_FOLLOWING = 7
_NUM_RANKS = 8


class LastTopDrafter(Drafter):
    """See the module. State per request: the candidates."""

    info = DrafterInfo("last_top", "What the target nearly said.", drafts_trees=True)

    def start(self, request: NewRequest) -> LastTopState:  # noqa: ARG002
        return LastTopState()


class LastTopState(RequestState):
    """One request."""

    def __init__(self) -> None:
        self._candidates: Sequence[int] = ()

    def observe(self, seen: Observation) -> None:
        """Keeps what was likely at the row whose token is the anchor now. A run that was trimmed has
        ended the request."""
        if seen.top_token_ids is None:
            return
        anchor = seen.token_ids[-1]
        top = seen.top_token_ids[seen.path[-1]]
        self._candidates = [each for each in top if each != anchor][:MAX_CANDIDATES]

    def propose(self, request: DraftRequest) -> DraftTree:
        candidates = self._candidates[: request.shape.width]
        if not candidates:
            return EMPTY
        builder = TreeBuilder()
        recent = list(request.token_ids[-_SEARCHED_TOKENS:])
        recent.reverse()
        for rank, token_id in enumerate(candidates):
            if len(builder) >= request.max_nodes:
                break
            num_following = min(
                request.depth - 1, request.max_nodes - len(builder) - 1, _MAX_FOLLOWING
            )
            node = builder.add(ROOT, token_id, rank)
            for behind, following in enumerate(_following(recent, token_id, num_following)):
                node = builder.add(node, following, _NUM_RANKS + behind)
        return builder.take(range(len(builder)))


def _following(recent: list[int], token_id: int, num_tokens: int) -> list[int]:
    """Returns the tokens after the newest occurrence of a token; ``recent`` runs backwards."""
    if num_tokens < 1 or token_id not in recent:
        return []
    at = recent.index(token_id)
    return recent[max(0, at - num_tokens) : at][::-1]
