"""``grammar``: the tokens that a request's grammar leaves no choice about, and nothing else.

Under every drafter they lead the draft, and forbidden tokens are left out of it: the engine sees to both
(``engine.speculation.constrained``). This one adds nothing to them, so it costs nothing: for tool calls
and JSON in texts where nothing repeats.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Drafter, DraftRequest, NewRequest, Observation, drafter
from drafters.tree import EMPTY, DraftTree


@drafter(
    "grammar",
    "Drafts what the request's grammar forces: punctuation, keys and names of JSON and tool calls. "
    "Every other drafter begins with them, too.",
    trees=False,
    cost="nothing but its rows",
)
class GrammarDrafter(Drafter):
    """Proposes nothing of its own."""

    def start(self, request: NewRequest) -> None:
        """There is nothing to know."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [EMPTY] * len(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""
