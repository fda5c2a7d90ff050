"""What a request used: token counts and the account of its speculation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from engine.events import SpeculativeStats
from server.reply.choices import ChoiceEnd
from server.reply.writers import (
    CompletionTokensDetails,
    GammaMove,
    PromptTokensDetails,
    SpeculativeUsage,
    Usage,
)


def build_usage(
    num_prompt_tokens: int,
    ends: Sequence[ChoiceEnd],
    choices_per_prompt: int,
    has_prediction: bool = False,
) -> Usage:
    """Usage over all choices of a request, in index order.

    ``num_prompt_tokens`` counts each prompt once. Cached tokens are those of each prompt's first
    choice: the choices after it find the prompt in the cache only because the first has just put
    it there.
    """
    num_completion_tokens = sum(end.num_tokens for end in ends)
    cached = sum(end.info.num_cached_tokens for end in ends[::choices_per_prompt])
    speculative = merge([end.info.speculative for end in ends])
    usage = Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        speculative=speculative,
    )
    if has_prediction:
        accepted = speculative.num_accepted_tokens
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=speculative.num_draft_tokens - accepted,
        )
    return usage


def merge(stats: Sequence[SpeculativeStats]) -> SpeculativeUsage:
    """The account of several choices of one request, in index order, as one.

    Counts, histograms and milliseconds add up; rates are taken of the sums, so choices weigh by
    what they did; the speed-up is total estimated time at gamma 0 over total time taken. The
    account is of the work done: it includes tokens a stop string cut off afterwards.
    """
    num_steps = sum(each.num_steps for each in stats)
    num_drafted = sum(each.num_draft_tokens for each in stats)
    num_accepted = sum(each.num_accepted_tokens for each in stats)
    num_emitted = sum(each.num_emitted_tokens for each in stats)
    gammas = sum(each.mean_gamma * each.num_steps for each in stats)
    return SpeculativeUsage(
        drafter=stats[0].drafter,
        num_steps=num_steps,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        acceptance_rate=num_accepted / num_drafted if num_drafted else None,
        tokens_per_step=num_emitted / num_steps if num_steps else None,
        mean_gamma=gammas / num_steps if num_steps else 0.0,
        acceptance_histogram=_add([each.acceptance_histogram for each in stats]),
        accepted_per_position=_add([each.accepted_per_position for each in stats]),
        estimated_speedup=_merge_speedup(stats),
        draft_ms=sum(each.draft_ms for each in stats),
        verify_ms=sum(each.verify_ms for each in stats),
        gamma_changes=[
            GammaMove(choice=index, step=move.step, gamma=move.gamma, reason=move.reason)
            for index, each in enumerate(stats)
            for move in each.gamma_changes
        ],
    )


def _add(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _merge_speedup(stats: Sequence[SpeculativeStats]) -> float | None:
    known = [
        (each.estimated_speedup, each.draft_ms + each.verify_ms)
        for each in stats
        if each.estimated_speedup is not None
    ]
    taken = sum(ms for _, ms in known)
    if not known:
        return None
    if taken <= 0:
        return sum(speedup for speedup, _ in known) / len(known)
    return sum(speedup * ms for speedup, ms in known) / taken
