"""A drafter made of a function that makes states, for those that need no class of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from drafters.base import Drafter, DrafterInfo, DraftRequest, NewRequest, Observation, OptionValue
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


class PerRequestDrafter(Drafter):
    """Requests share nothing, so tenants are isolated whatever their cache_salt."""

    def __init__(self, info: DrafterInfo, make_state: MakeState) -> None:
        super().__init__()
        self.info = info
        self._make_state = make_state

    def start(self, request: NewRequest) -> DraftState:
        return self._make_state(request.token_ids, request.options)
