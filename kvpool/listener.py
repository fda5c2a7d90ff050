"""The interface of those who are told which blocks the prefix cache can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CacheListener(Protocol):
    """Called by the pool, on its thread, after the change and in the order of changes."""

    def stored(
        self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], cache_salt: str
    ) -> None:
        """A full block, of ``token_ids``, can be found by its digest. ``parent`` names the block before
        it; None: it is the first of its text."""

    def removed(self, digest: bytes) -> None:
        """It was evicted."""

    def cleared(self) -> None:
        """All were forgotten."""
