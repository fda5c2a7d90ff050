"""Accounts of speculation, all of one additive kind: per request for its reply, per step for the metrics.

``accepted`` never counts the token that the target adds: ``emitted == accepted + steps`` unless a
stop trimmed a run. Plain Python; the engine thread is the only caller.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar

Reason = Literal[
    "", "no_match", "client_cap", "no_kv", "policy", "low_acceptance", "overload", "shed", "masks"
]
"""The reason why a grant is smaller than what could have been drafted.

``""``: it is not. ``no_match``: the drafter had nothing to offer. ``client_cap``: a bound the
client set (nodes, or tokens left to write). ``no_kv``: no room in the cache. ``policy``: the
policy's own gamma. ``low_acceptance``: would not pay even alone on the engine. ``overload``: would
pay alone, not now. ``shed``: drafts yield to the requests that wait. ``masks``: those of
the request's grammar take too long.
"""
Phase = Literal["draft", "forward", "verify"]
_MAX_GAMMA_CHANGES = 64
_Key = TypeVar("_Key")


@dataclass(slots=True)
class SpeculativeStats:
    """Sums over steps in which requests sampled; two accounts add up to that of both. Rates are of the
    sums, None where there is nothing to divide by.

    ``gammas[g]``: steps that verified g draft tokens; ``accepted[k]``: steps in which k of them were
    accepted; ``disabled[reason]``: steps whose proposal was cut to nothing. ``num_stop_tokens``: tokens
    that ended a text and are not emitted (EOS, stop ids); each took a step. ``draft_seconds`` and
    ``verify_seconds`` are the requests' shares (of their drafter's call; of forward and verification, by
    rows), ``step_seconds`` whole steps, ``baseline_seconds`` those of the same tokens at gamma 0.
    """

    gammas: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    disabled: Counter[str] = field(default_factory=Counter)
    num_emitted_tokens: int = 0
    num_stop_tokens: int = 0
    num_failed_drafts: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    baseline_seconds: float = 0.0

    def record(
        self,
        gamma: int,
        num_accepted: int,
        num_emitted: int,
        reason: str = "",
        draft_seconds: float = 0.0,
        verify_seconds: float = 0.0,
        step_seconds: float = 0.0,
        baseline_seconds: float = 0.0,
        num_stop_tokens: int = 0,
    ) -> None:
        """One request's step. ``reason`` says why gamma is no larger; empty: it need not be."""
        self.gammas[gamma] += 1
        self.accepted[num_accepted] += 1
        if gamma == 0 and reason:
            self.disabled[reason] += 1
        self.num_emitted_tokens += num_emitted
        self.num_stop_tokens += num_stop_tokens
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.step_seconds += step_seconds
        self.baseline_seconds += baseline_seconds

    def add(self, other: SpeculativeStats) -> None:
        """Another account into this one."""
        _count_in(self.gammas, other.gammas)
        _count_in(self.accepted, other.accepted)
        _count_in(self.disabled, other.disabled)
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_stop_tokens += other.num_stop_tokens
        self.num_failed_drafts += other.num_failed_drafts
        self.draft_seconds += other.draft_seconds
        self.verify_seconds += other.verify_seconds
        self.step_seconds += other.step_seconds
        self.baseline_seconds += other.baseline_seconds

    def __add__(self, other: SpeculativeStats) -> SpeculativeStats:
        names = (each.name for each in fields(SpeculativeStats))
        return SpeculativeStats(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def num_steps(self) -> int:
        return self.gammas.total()

    @property
    def num_drafts(self) -> int:
        """Steps that verified any draft."""
        return self.num_steps - self.gammas[0]

    @property
    def num_draft_tokens(self) -> int:
        return sum(gamma * count for gamma, count in self.gammas.items())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(accepted * count for accepted, count in self.accepted.items())

    @property
    def acceptance_rate(self) -> float | None:
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def tokens_per_step(self) -> float | None:
        """Stop tokens included, so that plain decoding has 1."""
        return _ratio(self.num_emitted_tokens + self.num_stop_tokens, self.num_steps)

    @property
    def mean_gamma(self) -> float:
        return _ratio(self.num_draft_tokens, self.num_steps) or 0.0

    @property
    def estimated_speedup(self) -> float | None:
        return _ratio(self.baseline_seconds, self.step_seconds)

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """``[k]``: steps that accepted k drafts."""
        return tuple(self.accepted[k] for k in range(max(self.accepted, default=-1) + 1))

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """``[d]``: steps that accepted more than d drafts, which is how often depth d + 1 was."""
        histogram = self.acceptance_histogram
        return tuple(sum(histogram[depth:]) for depth in range(1, len(histogram)))


def _count_in(own: Counter[_Key], more: Counter[_Key]) -> None:
    # What ``Counter.update`` does takes four times as long for the one or two keys of a step.
    for key, count in more.items():
        own[key] += count


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class GammaChange:
    """Gamma moved at a step of the request (steps count from 0 at its first sampled token)."""

    step: int
    gamma: int
    reason: str


@dataclass(slots=True)
class RequestStats(SpeculativeStats):
    """One request's account, kept while it runs and handed out with its last event; of the moves of
    gamma the last 64 are kept and all are counted."""

    drafter: str = "none"
    gamma_changes: deque[GammaChange] = field(
        default_factory=lambda: deque(maxlen=_MAX_GAMMA_CHANGES)
    )
    num_gamma_changes: int = 0

    def note_gamma(self, gamma: int, reason: str) -> None:
        """The gamma of the step that is recorded next."""
        last = self.gamma_changes[-1].gamma if self.gamma_changes else 0
        if gamma != last:
            self.gamma_changes.append(GammaChange(self.num_steps, gamma, reason or "granted"))
            self.num_gamma_changes += 1


class _Stretch:
    """A part of a step. No generator: a step has eight of them, which would take twice as long."""

    __slots__ = ("_clock", "_phase", "_start")

    def __init__(self, clock: StepClock, phase: Phase) -> None:
        self._clock, self._phase = clock, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        clock, phase = self._clock, self._phase
        setattr(clock, phase, getattr(clock, phase) + time.perf_counter() - self._start)


@dataclass(slots=True)
class StepClock:
    """Divides a step's seconds among its phases; what none claims is the engine's own overhead."""

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    step: float = 0.0
    """All of it, once ``stop`` has been called."""
    took_longer: bool = False
    """As ``ForwardOutput`` has it."""
    start: float = field(default_factory=time.perf_counter)

    def measure(self, phase: Phase) -> _Stretch:
        """Returns a context; the time within is the phase's."""
        return _Stretch(self, phase)

    def forward_took(self, seconds: float, is_ahead: bool = False) -> None:
        """The device's own clock: what it ran beyond the forward's launch was seen as verification.
        ``is_ahead``: it ran while the host was at the step before, too."""
        both = self.forward + self.verify
        self.forward = seconds if is_ahead else min(seconds, both)
        self.verify = max(0.0, both - self.forward)

    def stop(self) -> None:
        self.step = time.perf_counter() - self.start

    @property
    def target(self) -> float:
        """The target's part, which grows with rows."""
        return self.forward + self.verify

    @property
    def other(self) -> float:
        return max(0.0, self.step - self.draft - self.forward - self.verify)


@dataclass(slots=True)
class StepStats:
    """An engine's step in numbers, or several that followed each other, for metrics: counters are of all
    of them, gauges are now. Without rows it was no step."""

    num_steps: int = 1
    num_rows: int = 0
    num_prompt_tokens: int = 0
    by_drafter: dict[str, SpeculativeStats] = field(default_factory=dict)
    """Accounts of the requests that sampled, by the drafter they named."""
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    step_seconds: float = 0.0
    baseline_seconds: float = 0.0
    """Estimated time of this step's emitted tokens at gamma 0."""
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    """KV blocks by state: free, draft, committed, cached."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    """Both in tokens."""
    state_slots: Mapping[str, int] = field(default_factory=dict)
    """Slots of states by what they hold; empty where the model's layers keep none."""
    state_hits: int = 0
    """Requests that began from a snapshot."""
    num_draft_failures: int = 0
    num_kv_events: int = 0
    num_kv_events_dropped: int = 0
    """Sent, and lost to a full queue."""
    offload_blocks: int = 0
    offload_bytes: int = 0
    """Evicted blocks that are kept, and their size."""
    offload_restored_tokens: int = 0
    offload_damaged: int = 0
    offload_dropped: int = 0
    """Blocks that were found damaged, and evicted ones that could not be kept."""
    device_memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes by kind: used, free, allocated by the engine. Now and then, and only of a GPU."""

    @property
    def num_emitted_tokens(self) -> int:
        return sum(each.num_emitted_tokens for each in self.by_drafter.values())

    def goes_on_with(self, later: StepStats) -> bool:
        """Whether later steps are of the same kind and can be summed with these, so that figures that
        apply to some kinds only, such as the time of steps with a baseline, are not mixed with others'.
        """
        return (
            self.num_rows > 0
            and later.num_rows > 0
            and (self.baseline_seconds > 0) == (later.baseline_seconds > 0)
        )

    def add(self, later: StepStats) -> None:
        """Steps that followed these into them; ``later`` is not to be used any more."""
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name, account in later.by_drafter.items():
            if name in self.by_drafter:
                self.by_drafter[name].add(account)
            else:
                self.by_drafter[name] = account
        for name in _GAUGES:
            setattr(self, name, getattr(later, name))
        self.device_memory = later.device_memory or self.device_memory


_GAUGES = (
    *("num_running", "num_waiting", "blocks", "state_slots"),
    *("offload_blocks", "offload_bytes"),
)
_COUNTERS = tuple(
    each.name
    for each in fields(StepStats)
    if each.name not in (*_GAUGES, "by_drafter", "device_memory")
)


def idle_stats(num_blocks: int) -> StepStats:
    """The gauges of an engine that has not begun to work."""
    return StepStats(blocks={"free": num_blocks, "draft": 0, "committed": 0, "cached": 0})
