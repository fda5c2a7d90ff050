"""What a copy got wrong before: where the original says this, the text has been saying that.

Owned by the ``suffix`` drafter. An edit that renames something breaks a copy at every place of the
name, each time in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.contexts import TOKEN_BITS

MAX_CORRECTIONS = 4_096


class Corrections:
    """Per (previous token, token of the original): what came instead last time, how often a copy
    broke off there, and how often it did not after the first time.

    Memory: about 150 bytes each, the ``MAX_CORRECTIONS`` learnt last.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, previous: int, original: int, actual: int) -> None:
        """After ``previous``, the copy said ``original`` and the text ``actual``."""
        key = (previous << TOKEN_BITS) | original
        known = self._known.pop(key, None) or [actual, 0, 0]
        known[0] = actual
        known[1] += 1
        self._known[key] = known
        if len(self._known) > MAX_CORRECTIONS:
            del self._known[next(iter(self._known))]

    def confirm(self, previous: int, token_ids: Sequence[int]) -> None:
        """The copy said ``token_ids`` after ``previous``, and was right."""
        if not self._known:
            return
        for token_id in token_ids:
            known = self._known.get((previous << TOKEN_BITS) | token_id)
            if known is not None:
                known[2] += 1
            previous = token_id

    def find(self, previous: int, original: int, min_share: float) -> tuple[int, float] | None:
        """What may come instead of ``original``, and how likely; None where that is less than
        ``min_share`` or nothing is known."""
        known = self._known.get((previous << TOKEN_BITS) | original)
        if known is None:
            return None
        token_id, num_broken, num_right = known
        share = num_broken / (num_broken + num_right + 1)
        return (token_id, share) if share >= min_share else None

    def any_in(self, previous: int, token_ids: Sequence[int], min_share: float) -> bool:
        """Whether ``find`` has something about a copy of ``token_ids`` after ``previous``."""
        if not self._known:
            return False
        for token_id in token_ids:
            key = (previous << TOKEN_BITS) | token_id
            if key in self._known and self.find(previous, token_id, min_share) is not None:
                return True
            previous = token_id
        return False
