"""A request's usage: token counts and the account of its speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from engine.request.stats import RequestStats, SpeculativeStats
from server.plan import RequestPlan
from server.reply.deltas import ChoiceEnd


class GammaMove(TypedDict):
    """At step ``step`` of choice ``choice`` gamma became ``gamma``."""

    choice: int
    step: int
    gamma: int
    reason: str


class SpeculativeUsage(TypedDict):
    """The drafts and their gain, over all choices; ``merge`` says how they are combined."""

    drafter: str
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    tokens_per_step: float | None
    mean_gamma: float
    acceptance_histogram: list[int]
    accepted_per_position: list[int]
    estimated_speedup: float | None
    draft_ms: float
    verify_ms: float
    gamma_changes: list[GammaMove]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """The drafts of a ``prediction`` that became output, and those that did not; and for models whose
    reasoning is split off, the tokens before its end.
    """

    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]
    reasoning_tokens: NotRequired[int]


class RunningUsage(TypedDict):
    """The tokens of all choices so far, of a request that goes on."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(RunningUsage):
    """A prompt counts once however many choices it has; tokens a stop string cut off do not
    count. ``completion_tokens_details`` is there where it has something to say.
    """

    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    speculative: SpeculativeUsage


class DraftMetrics(TypedDict):
    """An account of the ``num_spec_steps`` steps that verified drafts: ``acceptance_histogram[k]`` is
    how many accepted k; ``mean_acceptance_length`` counts the target's own token, too.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class ReplyMetrics(TypedDict):
    """The account of speculation as vLLM words it, for clients that read it there."""

    speculative_decoding: DraftMetrics


def reply_metrics(usage: Usage) -> ReplyMetrics | None:
    """None where no draft was verified."""
    account = usage["speculative"]
    num_drafts = account["num_drafts"]
    if not num_drafts:
        return None
    accepted, drafted = account["num_accepted_tokens"], account["num_draft_tokens"]
    none_accepted, *rest = account["acceptance_histogram"]
    return ReplyMetrics(
        speculative_decoding=DraftMetrics(
            mean_acceptance_length=1 + accepted / num_drafts,
            draft_acceptance_rate=accepted / drafted,
            # Steps without a draft accepted none.
            acceptance_histogram=[none_accepted - (account["num_steps"] - num_drafts), *rest],
            num_spec_steps=num_drafts,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
        )
    )


def build_usage(plan: RequestPlan, ends: Sequence[ChoiceEnd]) -> Usage:
    """Usage over all choices of a request, in index order.

    Cached tokens are those of each prompt's first choice: the choices after it find the prompt in the
    cache only because the first has just put it there.
    """
    num_completion_tokens = sum(end.num_tokens for end in ends)
    cached = sum(end.info.num_cached_tokens for end in ends[:: plan.n])
    speculative = merge([end.info.speculative for end in ends])
    usage = Usage(
        prompt_tokens=plan.num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=plan.num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        speculative=speculative,
    )
    details: CompletionTokensDetails = {}
    if plan.has_prediction:
        accepted = speculative["num_accepted_tokens"]
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = speculative["num_draft_tokens"] - accepted
    if plan.splits_reasoning:
        details["reasoning_tokens"] = sum(end.num_reasoning_tokens for end in ends)
    if details:
        usage["completion_tokens_details"] = details
    return usage


def merge(stats: Sequence[RequestStats]) -> SpeculativeUsage:
    """The account of several choices of one request, in index order, as one.

    Counts, histograms and seconds add up; rates are taken of the sums, so choices weigh by what they
    did; the speed-up is total estimated time at gamma 0 over total time taken. The account is of the
    work done: it includes tokens a stop string cut off afterwards.
    """
    total = sum(stats, SpeculativeStats())
    return SpeculativeUsage(
        drafter=stats[0].drafter,
        num_steps=total.num_steps,
        num_drafts=total.num_drafts,
        num_draft_tokens=total.num_draft_tokens,
        num_accepted_tokens=total.num_accepted_tokens,
        acceptance_rate=total.acceptance_rate,
        tokens_per_step=total.tokens_per_step,
        mean_gamma=total.mean_gamma,
        acceptance_histogram=list(total.acceptance_histogram),
        accepted_per_position=list(total.accepted_per_position),
        estimated_speedup=total.estimated_speedup,
        draft_ms=1000.0 * total.draft_seconds,
        verify_ms=1000.0 * total.verify_seconds,
        gamma_changes=[
            GammaMove(choice=index, step=move.step, gamma=move.gamma, reason=move.reason)
            for index, each in enumerate(stats)
            for move in each.gamma_changes
        ],
    )
