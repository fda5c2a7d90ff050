"""The base of drafters whose requests have nothing to share: one state object per request.

A subclass brings a ``DraftState`` factory; nothing crosses from one state to another, so tenants
are isolated whatever their cache_salt. Drafters that batch their requests implement ``Drafter`` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from drafters.base import DrafterInfo, DraftRequest, Observation, OptionValue
from drafters.tree import DraftTree


class DraftState(Protocol):
    """What a drafter knows of one request. ``num_top_tokens`` as in ``Drafter.num_top_tokens``."""

    num_top_tokens: int

    def propose(self, request: DraftRequest) -> DraftTree:
        """A tree of at most ``request.max_nodes`` nodes within ``request.shape``."""

    def observe(self, observation: Observation) -> None:
        """Learn from one step of this request."""


MakeState: TypeAlias = Callable[[Sequence[int], Mapping[str, OptionValue]], DraftState]
"""Called with the prompt's token ids and the request's options, all present and checked."""


class PerRequestDrafter:
    """Maps ``propose`` and ``observe`` over the states of the requests. See ``Drafter``."""

    def __init__(self, info: DrafterInfo, make_state: MakeState) -> None:
        self.info = info
        self._make_state = make_state
        self._states: dict[str, DraftState] = {}

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,  # noqa: ARG002  (part of the protocol; nothing is shared that it could divide)
    ) -> None:
        """Raises ValueError for options that do not fit and for a request that is already open."""
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        self._states[request_id] = self._make_state(token_ids, self.info.resolve(options))

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return [self._states[request.request_id].propose(request) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for observation in observations:
            self._states[observation.request_id].observe(observation)

    def num_top_tokens(self, request_id: str) -> int:
        """Raises KeyError for a request that is not open."""
        return self._states[request_id].num_top_tokens

    def close(self, request_id: str) -> None:
        """Forget the request; closing one that is not open does nothing (aborts may race)."""
        self._states.pop(request_id, None)
