"""A request's state: what is owed, what is committed, what a preemption takes."""

from __future__ import annotations

from engine.request.events import TokenLogprobs
from engine.request.params import GenerationRequest, SamplingParams
from engine.sampling.state import SamplingState
from engine.schedule.request import Request

PROMPT = (5, 6, 7, 8, 9)


def make(prompt_logprobs: int | None = None, priority: int = 2, order: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=10, prompt_logprobs=prompt_logprobs)
    params = GenerationRequest("r", PROMPT, sampling, priority=priority)
    return Request(params, SamplingState(params, (), 50, 100), order)


def test_emitted_tokens_are_owed_but_for_those_already_committed() -> None:
    request = make()
    request.start(0)
    request.commit(5 + 2, [1, 2, 3])
    assert request.token_ids == [*PROMPT, 1, 2, 3]
    assert (request.num_new_tokens, request.num_output_tokens, request.num_tokens_left) == (1, 3, 7)
    assert request.sampling.num_output_tokens == 3
    assert request.first_token_time is not None


def test_preemption_takes_the_keys_and_leaves_the_text() -> None:
    """The client is told how it was served first."""
    request = make()
    request.start(3)
    request.commit(2, [1])
    times = request.first_scheduled_time, request.first_token_time
    request.preempt()
    assert not request.is_running
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
    assert (request.num_new_tokens, request.sampling.num_output_tokens) == (6, 1)
    request.start(4)
    assert request.is_running
    assert (request.num_computed_tokens, request.num_new_tokens) == (4, 2)
    assert request.num_cached_tokens == 3
    assert (request.first_scheduled_time, request.first_token_time) == times


def test_rank_is_priority_then_arrival() -> None:
    early, late, important = make(order=0), make(order=1), make(priority=-1, order=2)
    assert sorted([late, important, early], key=lambda each: each.rank) == [important, early, late]


def test_prompt_logprobs_are_owed_until_all_but_the_first_are_there() -> None:
    request = make(prompt_logprobs=0)
    for position in range(1, 5):
        assert request.wants_prompt_logprobs
        assert request.max_cached_tokens() == 0
        request.prompt_logprobs[position] = TokenLogprobs(PROMPT[position], -1.0)
    assert not request.wants_prompt_logprobs
    assert request.max_cached_tokens() == 4
    assert not make().wants_prompt_logprobs
