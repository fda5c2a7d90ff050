"""Decides which requests may run a step ahead of what the host has read.

A device that works asynchronously need not wait for the host between two steps: the next one's rows
take their tokens from where the device has put them. What the host finds when it reads them (a stop
token, an abort) comes too late for a row that is already running; that row is discarded, and what it
stored is in a block that is not read before it is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.schedule.request import ScheduledRequest


def going_on(parts: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
    """Returns those parts of a launched step whose requests have another token to write after it, unless
    they stop; none where one of them needs the host before its next row."""
    if any(_needs_host(each) for each in parts):
        return []
    return [each for each in parts if each.request.num_tokens_left > 1]


def _needs_host(each: ScheduledRequest) -> bool:
    sampling = each.sampling
    return (
        not each.samples
        or not _is_followed(each)
        or sampling.verification != "match"
        or sampling.grammar is not None
        or bool(sampling.processors)
        or bool(each.hidden_layers)
        or each.num_top_tokens > 0
        or each.is_pooled
        or each.request.wants_prompt_logprobs
    )


def _is_followed(each: ScheduledRequest) -> bool:
    """Whether the device can tell by itself which row of its draft comes to be the anchor. The noise of
    sampled rows hangs on where they lie, which the host tells."""
    return not each.draft or (each.sampling.is_greedy and each.draft.is_chain())
