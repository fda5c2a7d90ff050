"""The speculative loop at its smallest: n-gram drafts, greedy verification, pure functions.

A specification to read and to test against, with a target that is a function of the text. The
engine does the same over batches, trees and sampled tokens (``drafters/copying/ngram.py``,
``engine/verification/match.py``); nothing in it calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Target: TypeAlias = Callable[[Sequence[int]], int]
"""The token that the target writes after a text: a deterministic function."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """``num_runs`` counts runs of the target; ``len(token_ids) == num_accepted + num_runs``."""

    token_ids: list[int]
    num_proposed: int
    num_accepted: int
    num_runs: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the proposed; 0 where nothing was."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def tokens_per_run(self) -> float:
        return len(self.token_ids) / self.num_runs if self.num_runs else 0.0


def ngram_propose(context: Sequence[int], n: int, k: int, is_cyclic: bool = False) -> list[int]:
    """The up to ``k`` tokens that followed the most recent earlier occurrence of the last ``n``.

    Empty without an occurrence, and where ``n`` or ``k`` is below 1. At the end of the text a draft
    stops, so text of period P drafts at most P tokens; with ``is_cyclic`` it goes on into itself,
    as an overlapped copy in LZ77 does.
    """
    if n < 1 or k < 1 or len(context) <= n:
        return []
    last = list(context[-n:])
    for start in range(len(context) - n - 1, -1, -1):
        if list(context[start : start + n]) == last:
            run = list(context[start + n : start + n + k])
            return [run[i % len(run)] for i in range(k)] if is_cyclic else run
    return []


def verify_greedy(
    context: Sequence[int], proposed: Sequence[int], target: Target
) -> tuple[list[int], int]:
    """Runs the target once. It emits the proposed tokens that it agrees with, up to the first that it
    does not, then its own next token. So at least one, and at most ``len(proposed) + 1``.

    Returns the emitted tokens and how many of them were proposed.
    """
    text = list(context)
    num_accepted = 0
    for token_id in proposed:
        if token_id != target(text):
            break
        text.append(token_id)
        num_accepted += 1
    text.append(target(text))
    return text[len(context) :], num_accepted


def run_speculative(
    context: Sequence[int], target: Target, n: int, k: int, num_tokens: int, is_cyclic: bool = False
) -> LoopResult:
    """Write at least ``num_tokens`` tokens after ``context``: the last run may overshoot by ``k``."""
    text = list(context)
    num_proposed = num_accepted = num_runs = 0
    while len(text) - len(context) < num_tokens:
        proposed = ngram_propose(text, n, k, is_cyclic)
        emitted, accepted = verify_greedy(text, proposed, target)
        text += emitted
        num_proposed += len(proposed)
        num_accepted += accepted
        num_runs += 1
    return LoopResult(text[len(context) :], num_proposed, num_accepted, num_runs)


def run_baseline(context: Sequence[int], target: Target, num_tokens: int) -> LoopResult:
    """Plain greedy decoding: a run of the target for each of ``num_tokens`` tokens."""
    text = list(context)
    for _ in range(num_tokens):
        text.append(target(text))
    return LoopResult(text[len(context) :], 0, 0, max(0, num_tokens))
