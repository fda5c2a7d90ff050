"""The terms on which a tenant's requests are served."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from engine.request.params import GenerationRequest, Tenant
from server.errors import refused
from server.plan import RequestPlan


@dataclass(frozen=True, slots=True)
class Terms:
    """``salt`` is part of all salts of the tenant's requests, ``priority`` what theirs is added to,
    ``max_tokens`` the longest output of a choice, ``drafters`` and ``adapters`` those that its requests
    may have; None: all."""

    tenant: Tenant
    salt: str
    priority: int = 0
    max_tokens: int | None = None
    drafters: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None

    def on(self, plan: RequestPlan) -> RequestPlan:
        """The request on these terms. Raises ApiError with the client's names of fields."""
        limits = [each for each in (plan.limit, self.max_tokens) if each is not None]
        with plan.names.in_refusals():
            choices = [replace(each, request=self._request(each.request)) for each in plan.choices]
            found = replace(plan, choices=tuple(choices), limit=min(limits, default=None))
            self._check_number(found)
        return found

    def _check_number(self, plan: RequestPlan) -> None:
        """Raises ApiError where no time to wait would be enough."""
        most, rate = self.tenant.max_concurrent_requests, self.tenant.requests_per_minute
        if most is not None and plan.num_at_once > most:
            field = "n" if plan.n > 1 else "prompt"
            raise refused(field, f": this API key may have {most} choices at a time")
        if rate is not None and len(plan.choices) > plan.n * rate:
            raise refused("prompt", f": this API key may have {rate} requests per minute")

    def _request(self, request: GenerationRequest) -> GenerationRequest:
        if request.priority < 0:
            raise refused("priority", ": with this API key it must be 0 or more")
        sampling = request.sampling
        if self.max_tokens is not None:
            sampling = replace(
                sampling,
                max_tokens=min(sampling.max_tokens, self.max_tokens),
                min_tokens=min(sampling.min_tokens, self.max_tokens),
            )
        return replace(
            request,
            sampling=sampling,
            priority=self.priority + request.priority,
            cache_salt=json.dumps([self.salt, request.cache_salt]),
            tenant=self.tenant,
        )
