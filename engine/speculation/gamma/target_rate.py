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

    def adjust(self, rate: float, target: float, least: int, most: int) -> None:
        """Take in a rate; gamma stays within ``least``..``most``."""
        self.rates.append(rate)
        surplus = sum(self.rates) / len(self.rates) - target
        if surplus > _TOLERANCE + _ROUNDING:
            self.gamma = min(self.gamma + 1, most)
        elif surplus < -_TOLERANCE - _ROUNDING:
            self.gamma = max(self.gamma - 1, least)


@dataclass(slots=True)
class _Steered(SteeredGamma):
    """One request's gamma."""

    params: SpeculativeParams = field(default_factory=SpeculativeParams)
    num_idle_steps: int = 0

    def observe(self, rate: float) -> None:
        wanted = self.params
        target = wanted.target_acceptance_rate
        target = _USUAL_TARGET if target is None else target
        self.adjust(rate, target, wanted.min_speculative_tokens, wanted.max_speculative_tokens)

    def rest(self) -> None:
        self.num_idle_steps += 1
        if self.num_idle_steps >= _WINDOW and self.params.max_speculative_tokens > 0:
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
        self._steering: dict[str, _Steered] = {}

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        state = self._steering.get(request_id)
        if state is None:
            gamma = max(
                params.min_speculative_tokens,
                min(params.num_speculative_tokens, params.max_speculative_tokens),
            )
            state = self._steering[request_id] = _Steered(gamma, params=params)
        return state.gamma

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:
        state = self._steering.get(request_id)
        if state is None:
            return
        if num_granted > 0:
            state.observe(num_accepted / num_granted)
        elif state.gamma == 0:
            state.rest()

    def forget(self, request_id: str) -> None:
        self._steering.pop(request_id, None)
