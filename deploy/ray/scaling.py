"""How much an engine has to do, and how many replicas that takes: by the tokens that open requests may
still take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.request.events import TokenEvent
from engine.request.params import GenerationRequest

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class OpenTokens:
    """``total``: what open requests, those that wait included, may still take."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def counted(self, request: GenerationRequest) -> Iterator[Callable[[TokenEvent], None]]:
        """The request is open until the end of the block, which gets what is to be told of its events."""
        left = len(request.prompt_token_ids) + request.sampling.max_tokens
        self.total += left

        def count(event: TokenEvent) -> None:
            nonlocal left
            # The first one says that the prompt is done, too.
            still = min(left, request.sampling.max_tokens) - len(event.token_ids)
            self.total -= left - still
            left = still

        try:
            yield count
        finally:
            self.total -= left


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
