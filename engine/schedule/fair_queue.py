"""The queue of waiting requests: priorities first, then tenants by what they were served.

Each tenant has a counter of tokens served, prompts and what was written, over its weight; of those that
wait in the best priority, the one with the smallest goes first (virtual token counters, arXiv
2401.00588). Within a tenant and a priority, first come is first served.

Between two tenants that wait all along, tokens over weight differ by no more than what one tenant can
have running at a time, over its weight: the one that was started last had the smallest counter then. A
tenant that comes back is put level with those that wait, so that no tenant saves up time.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.schedule.request import Request


class FairQueue:
    """``charge`` keeps the counters; the queue itself looks at no clock and no blocks."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._served: dict[str, float] = {}
        self._last_started = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Goes by priority and tenant; the first request is the one whose turn it is."""
        return iter(sorted(self._waiting, key=self._turn))

    def push(self, request: Request) -> None:
        """A request that came in, or lost its blocks."""
        self._level_with_others(request.params.tenant.name)
        self._waiting.append(request)

    def first(self) -> Request | None:
        return min(self._waiting, key=self._turn, default=None)

    def start(self, request: Request) -> None:
        """The request waits no more, since it runs."""
        self.remove(request)
        self._last_started = request.params.tenant.name
        self.charge(request)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def charge(self, request: Request) -> None:
        """The tenant pays for those of the request's tokens that it did not pay for yet: its prompt once
        it starts, then what is written. Recomputing costs no tenant anything."""
        num_new = len(request.token_ids) - request.num_charged_tokens
        if num_new:
            tenant = request.params.tenant
            self._served[tenant.name] = self._of(tenant.name) + num_new / tenant.weight
            request.num_charged_tokens += num_new

    def forget(self) -> None:
        """Nobody waits or runs: all begin anew as equals."""
        self._served.clear()

    def _of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def _turn(self, request: Request) -> tuple[int, float, int]:
        priority, order = request.rank
        return priority, self._of(request.params.tenant.name), order

    def _level_with_others(self, tenant: str) -> None:
        waiting = {each.params.tenant.name for each in self._waiting}
        if tenant not in waiting:
            least = min(map(self._of, waiting), default=self._of(self._last_started))
            self._served[tenant] = max(self._of(tenant), least)
