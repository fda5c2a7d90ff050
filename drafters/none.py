"""Plain decoding, as a drafter: it never has a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafters.base import DrafterInfo, DraftRequest, Observation, OptionValue
from drafters.tree import EMPTY, DraftTree


class NoneDrafter:
    """Keeps nothing, proposes nothing. See ``Drafter``."""

    info = DrafterInfo(
        name="none",
        description="Plain decoding: one token per step, nothing drafted.",
        drafts_trees=False,
    )

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None:
        """Raises ValueError if options are given: there are none."""
        del request_id, token_ids, cache_salt
        self.info.resolve(options)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [EMPTY] * len(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def num_top_tokens(self, request_id: str) -> int:
        del request_id
        return 0

    def close(self, request_id: str) -> None:
        """Nothing to forget."""
