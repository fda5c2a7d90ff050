"""Holds each request's acceptance rate near a target by moving its gamma one at a time.

It keeps a rate, not a speed: the fastest reply is goodput's aim. A request that may fall
to gamma 0 tries one node again after a window's worth of steps, since at 0 there is no rate to see.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.request.params import SpeculativeParams
from engine.speculation.gamma.policy import GammaPolicy, StepCost, gamma_policy

_WINDOW = 10
_TOLERANCE = 0.1
_ROUNDING = 1e-9
_USUAL_TARGET = 0.7
"""The target of requests that name no other."""


@dataclass(slots=True)
class SteeredGamma:
    """A gamma that moves by one where the mean of the last ten acceptance rates is more than 0.1 away
    from a target: up above it, down below it."""

    gamma: int
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    num_idle_steps: int = 0

    def adjust(self, rate: float, target: float, least: int, most: int) -> None:
        """Gamma follows a further rate, and stays within ``least``..``most``."""
        self.rates.append(rate)
        surplus = sum(self.rates) / len(self.rates) - target
        if surplus > _TOLERANCE + _ROUNDING:
            self.gamma = min(self.gamma + 1, most)
        elif surplus < -_TOLERANCE - _ROUNDING:
            self.gamma = max(self.gamma - 1, least)

    def rest(self) -> None:
        """A step at gamma 0 is over."""
        self.num_idle_steps += 1
        if self.num_idle_steps >= _WINDOW:
            self.gamma, self.num_idle_steps = 1, 0
            # Old rates would send it straight back to 0 whatever the new one says.
            self.rates.clear()


@gamma_policy(
    "target_rate",
    "steers to an acceptance rate",
    [
        "num_speculative_tokens",
        "min_speculative_tokens",
        "max_speculative_tokens",
        "target_acceptance_rate",
    ],
)
class TargetRatePolicy(GammaPolicy):
    """Starts from ``num_speculative_tokens`` and moves within ``min_speculative_tokens`` ..
    ``max_speculative_tokens``. A step's rate is its accepted over its verified drafts; steps without a
    draft change nothing.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__(cost)
        self._requests: dict[str, tuple[SteeredGamma, SpeculativeParams]] = {}

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        if request_id not in self._requests:
            gamma = min(params.num_speculative_tokens, params.max_speculative_tokens)
            gamma = max(params.min_speculative_tokens, gamma)
            self._requests[request_id] = SteeredGamma(gamma), params
        return self._requests[request_id][0].gamma

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:
        if request_id not in self._requests:
            return
        steered, params = self._requests[request_id]
        least, most = params.min_speculative_tokens, params.max_speculative_tokens
        if num_granted > 0:
            target = params.target_acceptance_rate
            target = _USUAL_TARGET if target is None else target
            steered.adjust(num_accepted / num_granted, target, least, most)
        elif steered.gamma == 0 and most > 0:
            steered.rest()

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
