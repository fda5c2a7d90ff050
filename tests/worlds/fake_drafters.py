"""Drafters that do as they are told: propose what a test wants, note every call, fail on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterNeeds,
    DraftRequest,
    NewRequest,
    Observation,
    OptionValue,
    TextReader,
)
from drafters.tree import EMPTY, DraftTree, chain

NO_NEEDS = DrafterNeeds()
Propose = Callable[[DraftRequest], Any]


class FakeDrafter(Drafter):
    """``propose`` answers each ask. ``fails`` names a method that raises, for requests in ``failing``
    (None: for all)."""

    def __init__(
        self,
        name: str = "fake",
        propose: Propose = lambda _: EMPTY,
        fails: str = "",
        failing: set[str] | None = None,
        num_top: int = 0,
        needs: DrafterNeeds = NO_NEEDS,
    ) -> None:
        super().__init__()
        self.info = DrafterInfo(name, "Does as it is told.", needs=needs)
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.asks: list[list[DraftRequest]] = []
        self.observed: list[list[Observation]] = []
        self.fails = fails
        self._propose = propose
        self._failing = failing
        self._num_top = num_top

    def _maybe_fail(self, method: str, request_id: str) -> None:
        if method == self.fails and (self._failing is None or request_id in self._failing):
            raise RuntimeError(f"{method} was told to fail for {request_id}")

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None:
        del token_ids, options, cache_salt
        self.opened.append(request_id)
        self._maybe_fail("open", request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.asks.append(list(requests))
        for ask in requests:
            self._maybe_fail("propose", ask.request_id)
        return [self._propose(ask) for ask in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.observed.append(list(observations))
        for seen in observations:
            self._maybe_fail("observe", seen.request_id)

    def num_top_tokens(self, request_id: str) -> int:
        self._maybe_fail("num_top_tokens", request_id)
        return self._num_top

    def close(self, request_id: str) -> None:
        self.closed.append(request_id)
        self._maybe_fail("close", request_id)


def foreseeing(text: Sequence[int], num_right: int = 100) -> Propose:
    """Drafts what comes: ``text`` is the whole of prompt and output; after ``num_right`` right tokens
    of a draft the others are wrong."""

    def propose(ask: DraftRequest) -> DraftTree:
        done = len(ask.token_ids)
        depth = min(ask.max_nodes, ask.shape.depth)
        coming = list(text[done : done + depth])
        return chain([t if i < num_right else t ^ 1 for i, t in enumerate(coming)])

    return propose


class TakenText(TextReader):
    """All that it was given of a text, in that order."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.taken: list[int] = []

    def _read(self, start: int, end: int) -> None:
        self.taken += self._token_ids[start:end]

    def observe(self, observation: Observation) -> None:
        self.taken += observation.emitted_token_ids


class TakingDrafter(Drafter):
    info = DrafterInfo("taking", "Takes in texts.")

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, TakenText] = {}

    def start(self, request: NewRequest) -> TakenText:
        return self.made.setdefault(request.request_id, TakenText(request.token_ids))
