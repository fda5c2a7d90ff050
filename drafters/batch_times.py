"""How long batches take, by their size: what drafters weigh against the tokens that these bring."""

from __future__ import annotations

_EMA = 0.1
_MARGIN, _MORE_MARGIN, _MOST_DOUBLINGS = 1.25, 0.25, 3


class BatchTimes:
    """Seconds of a batch by its number of rows or requests, rounded up to a power of two. The first one
    of a size may have warmed something up: it only bounds what the second is believed to have taken. That
    may have been quick by chance, so the next few change the estimate more than later ones do."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        if key not in self._first:
            self._first[key] = seconds
            return
        known = self._seconds.get(key, min(seconds, self._first[key]))
        number = self._counts[key] = self._counts.get(key, 0) + 1
        rate = max(_EMA, 1 / number) if number > 1 else _EMA
        self._seconds[key] = known + rate * (min(seconds, 4 * known) - known)

    def expect(self, size: int) -> float:
        """Returns a lower bound for a size that was not timed yet: the time of a smaller one, or a part
        of a larger one's; 0 before anything was timed."""
        key = size.bit_length()
        if key in self._seconds or not self._seconds or not key:
            return self._seconds.get(key, 0.0)
        smaller = max((each for each in self._seconds if each < key), default=None)
        if smaller is not None:
            return self._seconds[smaller]
        larger = min(self._seconds)
        return self._seconds[larger] / (1 << (larger - key))


def margin_of(num_requests: int) -> float:
    """Returns how many times its price the draft of one of so many requests has to be expected to bring:
    1.25 for one, a quarter more for each doubling, and 2 from eight on. The largest of several estimates
    is mostly too large: with SmolLM2 and 8 or 32 requests, drafts brought half of what was expected."""
    return _MARGIN + _MORE_MARGIN * min(num_requests.bit_length() - 1, _MOST_DOUBLINGS)
