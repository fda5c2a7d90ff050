"""Limits of tenants, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.request.errors import TenantLimitError
from engine.request.params import Batch, GenerationRequest, SamplingParams, Tenant
from engine.schedule.limits import TenantLimits


@dataclass
class OpenRequest:
    params: GenerationRequest
    num_output_tokens: int = 0
    first_scheduled_time: float | None = 0.0


class World:
    def __init__(self, tenant: Tenant) -> None:
        self.now = 1000.0
        self.tenant = tenant
        self.limits = TenantLimits(lambda: self.now)
        self.num_sent = 0

    def admit(
        self, num_prompt: int = 1, choice: int = 0, batch: Batch | None = None, **known: Any
    ) -> OpenRequest:
        self.num_sent += 1
        sampling = SamplingParams(choice_index=choice)
        prompt = (0,) * num_prompt
        request = OpenRequest(
            GenerationRequest(str(self.num_sent), prompt, sampling, tenant=self.tenant, batch=batch)
        )
        self.limits.admit(request, **known)
        return request

    def refused(self, num_prompt: int = 1) -> TenantLimitError:
        with pytest.raises(TenantLimitError) as caught:
            self.admit(num_prompt)
        return caught.value

    def comes_back(self, error: TenantLimitError, num_prompt: int = 1) -> OpenRequest:
        """A second before the time that it was told is too early, and that time is not."""
        self.now += error.retry_after_seconds - 1
        self.refused(num_prompt)
        self.now += 1
        return self.admit(num_prompt)


def test_requests_per_minute() -> None:
    world = World(Tenant("a", requests_per_minute=3))
    for _ in range(2):
        world.limits.release(world.admit())
    world.limits.charge(world.tenant)  # one that the engine has no part in
    with pytest.raises(TenantLimitError, match="3 requests per minute"):
        world.limits.charge(world.tenant)
    error = world.refused()
    assert (error.code, error.retry_after_seconds) == ("rate_limited", 20)
    assert "3 requests per minute" in str(error)
    world.comes_back(error)
    world.now += 60
    for _ in range(3):
        world.admit()
    world.refused()


def test_a_batch_waits_for_as_many_as_it_has_and_what_never_ran_is_given_back() -> None:
    world = World(Tenant("a", requests_per_minute=60, tokens_per_minute=6000))
    for _ in range(50):
        world.limits.release(world.admit())
    batch = Batch("b", 30, 30, 30)
    with pytest.raises(TenantLimitError) as caught:
        world.admit(batch=batch)
    assert caught.value.retry_after_seconds == 20
    world.now += 20
    admitted = [world.admit(batch=batch, num_choices=30)]
    admitted += [world.admit(batch=batch, follows=True) for _ in range(29)]
    assert world.refused().code == "rate_limited"
    for each in admitted:
        each.first_scheduled_time = None
        world.limits.release(each)
    for _ in range(30):
        world.admit()
    # A batch of more tokens than are there is refused by its first prompt.
    world.now += 60
    world.admit(2)
    with pytest.raises(TenantLimitError, match="tokens per minute"):
        world.admit(batch=Batch("c", 2, 2, 5999))


def test_a_batch_has_as_many_seats_as_choices() -> None:
    world = World(Tenant("a", max_concurrent_requests=3))
    world.admit()
    with pytest.raises(TenantLimitError, match="3 choices"):
        world.admit(num_choices=3)
    world.admit(num_choices=2)
    world.admit(num_choices=1, follows=True)


def test_further_choices_of_a_prompt_are_no_request_and_cost_no_prompt() -> None:
    world = World(Tenant("a", requests_per_minute=1, tokens_per_minute=10))
    world.admit(10)
    world.admit(10, choice=1)
    world.now += 59
    assert world.refused().code == "rate_limited"


def test_tokens_are_charged_for_prompts_and_as_they_are_written() -> None:
    world = World(Tenant("a", tokens_per_minute=60))
    request = world.admit(20)
    request.num_output_tokens = 30
    error = world.refused(20)  # 10 are left
    assert (error.code, error.retry_after_seconds) == ("token_limit", 10)
    world.comes_back(error, 20)
    request.num_output_tokens = 90  # what runs may overdraw it
    assert world.refused(1).retry_after_seconds == 61
    world.limits.release(request)
    assert world.refused(1).retry_after_seconds == 61  # and it is paid once
    # Time before something was spent does not pay for it, and a prompt that never ran costs nothing.
    world = World(Tenant("a", tokens_per_minute=60))
    request = world.admit(1)
    world.now += 600
    request.num_output_tokens = 60
    assert world.refused(1).retry_after_seconds == 1
    world.now += 60
    request = world.admit(60)
    world.refused()
    request.first_scheduled_time = None
    world.limits.release(request)
    world.admit(60)


def test_a_prompt_of_more_than_a_minute_may_have_several_choices() -> None:
    """The first one's charge leaves the bucket overdrawn, which is no matter of the others."""
    world = World(Tenant("a", tokens_per_minute=10))
    world.admit(15)
    world.admit(15, choice=1)
    assert world.refused().code == "token_limit"


def test_a_prompt_of_more_than_a_minute_needs_a_full_bucket() -> None:
    world = World(Tenant("a", tokens_per_minute=60))
    world.limits.release(world.admit(600))
    error = world.refused(600)
    assert error.retry_after_seconds == 600
    world.comes_back(error, 600)


def test_choices_at_a_time() -> None:
    world = World(Tenant("a", max_concurrent_requests=2))
    first = world.admit()
    world.admit(choice=1)
    error = world.refused()
    assert (error.code, error.retry_after_seconds) == ("too_many_concurrent", 1)
    world.now += 30
    world.limits.release(first)
    world.limits.release(first)  # twice is once
    world.admit()
    assert world.refused().retry_after_seconds == 15  # two of 30 s


def test_who_is_refused_has_taken_nothing() -> None:
    world = World(Tenant("a", requests_per_minute=2, tokens_per_minute=10))
    world.admit(10)
    for _ in range(5):
        assert world.refused(10).code == "token_limit"
    world.now += 60
    world.admit(5)
    world.admit(5)


def test_new_terms_count_at_once() -> None:
    world = World(Tenant("a", requests_per_minute=1))
    world.admit()
    world.tenant = replace(world.tenant, requests_per_minute=None)
    for _ in range(5):
        world.admit()
    world.tenant = replace(world.tenant, requests_per_minute=2)
    world.admit()
    world.admit()
    world.refused()


def test_tenants_do_not_spend_for_each_other_and_nobody_is_not_limited() -> None:
    world = World(Tenant("a", requests_per_minute=1))
    world.admit()
    world.tenant = Tenant("b", requests_per_minute=1)
    world.admit()
    world.tenant = Tenant()
    for _ in range(5):
        world.admit()
