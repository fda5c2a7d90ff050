"""A fixed number of nodes, whatever they cost."""

from __future__ import annotations

from engine.request.params import SpeculativeParams
from engine.speculation.gamma.policy import GammaPolicy, gamma_policy


@gamma_policy("fixed", "always the same number of drafts", ["num_speculative_tokens"])
class FixedPolicy(GammaPolicy):
    """``num_speculative_tokens`` nodes whenever the drafter has them."""

    bound = "client_cap"

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:  # noqa: ARG002
        return params.num_speculative_tokens
