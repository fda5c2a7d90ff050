"""How many replicas: by the tokens that their open requests may still take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class TokenScaling:
    """A policy of Serve's autoscaler, whose bounds, delays and factors hold as ever. ``target_tokens``:
    queued and running tokens that a replica should have."""

    def __init__(self, target_tokens: float = 4096.0) -> None:
        if not target_tokens > 0:
            raise ValueError("target_tokens: must be above 0")
        self._target = target_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas; as many as there are while nothing is known."""
        by_replica = (context.aggregated_metrics or {}).get("open_tokens")
        if not by_replica:
            return context.target_num_replicas, {}
        # A replica that has not said anything yet takes its share all the same.
        return max(1.0, sum(by_replica.values()) / self._target), {}
