"""Limits of tenants: prompts and tokens per minute, and requests at a time.

The engine sees all requests, whichever process sent them, so what is counted here is exact with several
of these. A rate is a bucket that is filled evenly to a minute's worth. It is asked for a prompt when the
prompt comes in, and pays for what is written as it is written: the bucket may be overdrawn by what was
admitted, and then nothing is until it has been filled up again. What a prompt that never ran was charged
is given back, and a prompt of more than a minute's worth needs a full bucket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.request.errors import TenantLimitError
from engine.request.params import GenerationRequest, Tenant
from engine.schedule.request import Request

_MINUTE = 60.0
# How much a request that ends says of how long requests are open.
_WEIGHT = 0.2


@dataclass(slots=True)
class _Bucket:
    """``spent``: what is not filled up yet; never below 0, and unlimited above."""

    spent: float = 0.0
    updated: float = 0.0

    def fill(self, per_minute: int | None, now: float) -> None:
        """For the time since the last look; unlimited ones are always full."""
        filled = self.spent if per_minute is None else (now - self.updated) * per_minute / _MINUTE
        self.spent, self.updated = max(0.0, self.spent - filled), now

    def take(self, amount: float) -> None:
        self.spent = max(0.0, self.spent + amount)

    def seconds_until(self, amount: float, per_minute: int) -> float:
        """Until so much, or a minute's worth, may be taken."""
        missing = self.spent + min(amount, per_minute) - per_minute
        return max(0.0, missing * _MINUTE / per_minute)


@dataclass(slots=True)
class _Open:
    request: Request
    since: float
    num_paid: int = 0
    """Tokens that it wrote and its tenant paid for."""


@dataclass(slots=True)
class _Account:
    tenant: Tenant
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    open: dict[str, _Open] = field(default_factory=dict)
    mean_seconds: float = 0.0
    """That its latest requests were open."""

    def settle(self, now: float) -> None:
        """Fill the buckets, and pay for what was written."""
        self.requests.fill(self.tenant.requests_per_minute, now)
        self.tokens.fill(self.tenant.tokens_per_minute, now)
        for each in self.open.values():
            written = each.request.num_output_tokens
            self.tokens.take(written - each.num_paid)
            each.num_paid = written


class TenantLimits:
    """The accounts of all tenants, by name; those without one are not limited. Not for several threads at
    once. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, request: Request, num_choices: int = 1, follows: bool = False) -> None:
        """Take in a request, until ``release``. ``num_choices``: of its batch, so many that are not in
        yet; ``follows``: another one is, and its rates were checked for all. Raises TenantLimitError,
        and then has taken nothing."""
        tenant = request.params.tenant
        if not tenant.name:
            return
        now = self._clock()
        account = self._settled(tenant, now)
        num_prompts, num_tokens = _cost(request.params)
        _check_seats(account, num_choices)
        if not follows:
            batch = request.params.batch
            wanted = num_prompts if batch is None else batch.num_prompts
            _check_rate("requests", tenant.requests_per_minute, account.requests, wanted)
            wanted = num_tokens if batch is None else batch.num_tokens
            _check_rate("tokens", tenant.tokens_per_minute, account.tokens, wanted)
        account.requests.take(num_prompts)
        account.tokens.take(num_tokens)
        account.open[request.params.request_id] = _Open(request, now)

    def charge(self, tenant: Tenant) -> None:
        """Count a request in which the engine has no other part. Raises TenantLimitError, and then has
        counted nothing."""
        account = self._settled(tenant, self._clock())
        _check_rate("requests", tenant.requests_per_minute, account.requests, 1)
        account.requests.take(1)

    def _settled(self, tenant: Tenant, now: float) -> _Account:
        """The tenant's account as it is now, on these terms."""
        account = self._accounts.setdefault(tenant.name, _Account(tenant))
        account.settle(now)
        account.tenant = tenant
        return account

    def release(self, request: Request) -> None:
        """Ends the request's use of limits. Requests that were not admitted are ignored."""
        account = self._accounts.get(request.params.tenant.name)
        if account is None or request.params.request_id not in account.open:
            return
        now = self._clock()
        account.settle(now)
        each = account.open.pop(request.params.request_id)
        if request.first_scheduled_time is None:
            num_prompts, num_tokens = _cost(request.params)
            account.requests.take(-num_prompts)
            account.tokens.take(-num_tokens)
            return
        weight = _WEIGHT if account.mean_seconds else 1.0
        account.mean_seconds += weight * (now - each.since - account.mean_seconds)


def _cost(params: GenerationRequest) -> tuple[int, int]:
    """Prompts and their tokens: further choices of a prompt cost what they write."""
    return (0, 0) if params.sampling.choice_index else (1, len(params.prompt_token_ids))


def _check_seats(account: _Account, num_choices: int) -> None:
    most = account.tenant.max_concurrent_requests
    if most is not None and len(account.open) + num_choices > most:
        message = f"This key may have {most} choices written at a time (max_concurrent_requests)."
        seconds = math.ceil(account.mean_seconds / most)
        raise TenantLimitError("too_many_concurrent", message, max(1.0, seconds))


def _check_rate(what: str, per_minute: int | None, bucket: _Bucket, amount: int) -> None:
    if per_minute is None or amount == 0:  # a further choice of a prompt
        return
    seconds = bucket.seconds_until(amount, per_minute)
    if seconds > 0:
        code = {"requests": "rate_limited", "tokens": "token_limit"}[what]
        message = f"This key may spend {per_minute} {what} per minute ({what}_per_minute)."
        raise TenantLimitError(code, message, math.ceil(seconds))
