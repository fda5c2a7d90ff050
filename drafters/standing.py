"""Which members ``auto`` asks: those that add more tokens than are written in the time they take.

What a member adds is counted where it is asked: the tokens that it got right and that those asked before
it did not. A request's own count starts from that of all requests, so a request does not pay again for
what others have shown. What a member takes is measured. One that does not earn its time sleeps in that
request, and costs nothing; now and then somebody who sleeps is tried, and as often as the tokens allow
that were written meanwhile, whoever wrote them. No text is kept, so all tenants share this.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_GAIN = 0.3
"""Tokens per step that the members asked first are believed to add before anything is known."""
_FIRST_SECONDS = 5e-5
_OWN_WEIGHT = 0.04
_SHARED_WEIGHT = 0.01
"""The weight of the newest step in these averages."""
_TIME_WEIGHT = 0.1
_AROUND = 2.0
"""Laying a draft over others and judging it takes about as long as making it."""
_TRIAL_SHARE = 0.004
"""Trials cost no more than this part of what is written."""


@dataclass(slots=True)
class Standing:
    """One member, over all requests. ``gain``: tokens per step; ``seconds``: of a step for one request,
    its part of what is learned included."""

    gain: float
    seconds: float | None = None

    @classmethod
    def first(cls, is_asked: bool) -> Standing:
        """Before anything is known. ``is_asked``: the member is asked until it does not earn its time;
        others sleep until they are tried."""
        return cls(_FIRST_GAIN if is_asked else 0.0)

    def took(self, seconds: float) -> None:
        """One step took it so long; a slow one, which had much to catch up on, does not count far."""
        if self.seconds is None:
            self.seconds = seconds
        self.seconds += _TIME_WEIGHT * (min(seconds, 4 * self.seconds) - self.seconds)

    def price(self, tokens_per_second: float) -> float:
        """Returns the tokens that are not written meanwhile."""
        seconds = _FIRST_SECONDS if self.seconds is None else self.seconds
        return _AROUND * seconds * tokens_per_second


@dataclass(slots=True)
class Gain:
    """What a member adds in one request, in tokens per step."""

    standing: Standing
    tokens: float

    def hope(self) -> None:
        """There is a reason to believe in it, as in those who are asked first."""
        self.tokens = max(self.tokens, _FIRST_GAIN)

    def add(self, num_tokens: int) -> None:
        """It was asked and added so many."""
        self.tokens += _OWN_WEIGHT * (num_tokens - self.tokens)
        shared = self.standing
        shared.gain += _SHARED_WEIGHT * (num_tokens - shared.gain)


class Trials:
    """Whose turn it is to be tried, over all requests."""

    def __init__(self) -> None:
        self._num_written = 0.0

    def wrote(self, num_tokens: int) -> None:
        """So many tokens were written for requests in which somebody sleeps."""
        self._num_written += num_tokens

    def allow(self, price: float) -> bool:
        """Whether somebody is tried who costs so many tokens."""
        if self._num_written * _TRIAL_SHARE < price:
            return False
        self._num_written = 0.0
        return True
