"""Serve's router of requests: those that belong together to one replica, unless it has much more to do
than the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray.exchange import Forwarded
from slipstream.tools.simulate.affinity import home, preferred


class AffinityRouter(RequestRouter):
    """Routes the ``Forwarded`` among a call's arguments. Loads are what this handle has sent; a
    replica that is full on others' behalf refuses, and the next is asked."""

    def initialize_state(self, load_factor: float = 1.5, free_requests: int = 8) -> None:
        """``request_router_kwargs``; see ``preferred``. Raises ValueError."""
        if not load_factor >= 1.0:
            raise ValueError("load_factor: must be 1 or more")
        if free_requests < 1:
            raise ValueError("free_requests: must be 1 or more")
        self._limits: dict[str, Any] = {"load_factor": load_factor, "free_requests": free_requests}
        self._open: Counter[str] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One after the other, each only if those before it take no more."""
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        given = () if pending_request is None else pending_request.args
        request = next((each for each in given if isinstance(each, Forwarded)), None)
        key = None if request is None else request.key
        if request is not None and key is not None and by_id:
            request.choice.home = home(key, by_id)
        order = preferred(
            key,
            {each: self._open[each] for each in by_id},
            () if request is None else request.avoid,
            **self._limits,
        )
        return [[by_id[each]] for each in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request is on its way there."""
        super().on_send_request(replica_id)
        self._open[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, or did not get there."""
        super().on_request_completed(replica_id, internal_request_id)
        name = replica_id.unique_id
        self._open[name] -= 1
        if self._open[name] <= 0:
            del self._open[name]
