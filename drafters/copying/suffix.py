"""``suffix``: copies from wherever the text's ending was seen, and re-aligns after edits.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975): candidates are the places in the request's own
text, and in the same tenant's finished requests, whose contexts agree with the last tokens. In
addition, the drafter remembers where copying broke off, so that after an edit it resumes there on a
match of one token or none; and places' weights are fitted, not counted (``weights.py``).

All places continue side by side, like the branches of a trie: at each node the places that agree with
the path vote for the next token, with weights that grow with the match. docs/drafters/lookup.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    ReadingState,
    drafter,
)
from drafters.tree import DraftTree

if TYPE_CHECKING:
    from drafters.copying.alignment import Alignment


@drafter
class SuffixDrafter(Drafter):
    """See the module. State: an ``Alignment`` per request, bounded, and a bounded ``TenantHistory``
    per cache_salt."""

    info = DrafterInfo(
        "suffix",
        "Copies what followed earlier occurrences of the last tokens, in the request or in the "
        "tenant's finished requests, as a chain or a tree of the likeliest; after an edit it goes on "
        "where copying broke off. Best where the output repeats what was seen (edits, agents, code).",
        options=(
            DrafterOption(
                "use_history",
                True,
                "Draft also from the tenant's finished requests, and keep this one for later ones.",
            ),
        ),
        cost="Per step and request 8 to 15 microseconds; compiled when it is first built.",
    )

    def __init__(self) -> None:
        # Imported where they are used: numba takes a while.
        from drafters.copying.alignment import Desk
        from drafters.copying.suffix_index import Histories

        super().__init__()
        self._desk = Desk()
        self._histories = Histories()

    def start(self, request: NewRequest) -> SuffixState:
        from drafters.copying.alignment import Alignment

        wanted = request.options["use_history"]
        history = self._histories.of(request.cache_salt) if wanted else None
        return SuffixState(Alignment(request.token_ids, history, self._desk))

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        self._histories.advance()
        return super().propose(requests)

    def finish(self, request_id: str, state: SuffixState) -> None:  # noqa: ARG002
        state.finish()


class SuffixState(ReadingState):
    """One request: what it copies from, and its drafts."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment

    def read_prompt(self, num_tokens: int) -> int:
        """See ``ReadingState``."""
        return self._alignment.read(num_tokens)

    def observe(self, observation: Observation) -> None:
        self._alignment.extend(observation.token_ids)

    def finish(self) -> None:
        """Hands the text to the tenant's history."""
        self._alignment.finish()

    def propose(self, request: DraftRequest) -> DraftTree:
        self._alignment.extend(request.token_ids)
        return self._alignment.draft(request.max_nodes, request.shape.width, request.depth)
