"""A fixed number of nodes, whatever they cost."""

from __future__ import annotations

from collections.abc import Sequence

from engine.params import SpeculativeParams
from engine.speculation.gamma.policy import DraftCandidate, Grant, Load, grant_first


class FixedPolicy:
    """``num_tokens`` nodes whenever the drafter has them. No state."""

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:  # noqa: ARG002
        return params.num_tokens

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        num_spare = load.num_spare_rows
        grants = []
        for candidate in candidates:
            grant = grant_first(candidate, candidate.params.num_tokens, num_spare, "client_cap")
            num_spare -= grant.gamma
            grants.append(grant)
        return grants

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, request_id: str) -> None:
        """Nothing was kept."""
