"""How long batches take, by their size: what drafters weigh against the tokens that these bring."""

from __future__ import annotations

_EMA = 0.1


class BatchTimes:
    """Seconds of a batch by its number of rows or requests, rounded up to a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _EMA * (min(seconds, 4 * known) - known)

    def expect(self, size: int) -> float:
        """0 while no batch of about that size has been timed."""
        return self._seconds.get(size.bit_length(), 0.0)
