"""Drives a whole engine in a test: a drafter that knows the answer, and all streams read to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from drafters import registry
from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DraftRequest,
    Observation,
    OptionValue,
)
from drafters.tree import EMPTY, ROOT, DraftTree
from engine.process.threaded import AsyncEngine
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams


class OracleDrafter(Drafter):
    """Knows what the target will write after a prompt and drafts it as a tree, a wrong sibling before
    every right node: accepted rows then never lie where they are committed. Every third draft goes
    astray at its second level."""

    info = DrafterInfo("oracle", "Knows the answer.", drafts_trees=True)

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__()
        self._texts = [list(text) for text in texts]
        self._vocab_size = vocab_size
        self._num_proposed = 0

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> DraftTree:
        known = list(request.token_ids)
        text = next((text for text in self._texts if text[: len(known)] == known), None)
        if text is None:
            return EMPTY
        self._num_proposed += 1
        depth = min(request.shape.depth, request.max_nodes // 2)
        token_ids: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for level, right in enumerate(text[len(known) :][:depth]):
            astray = level == 1 and self._num_proposed % 3 == 0
            shift = 2 if astray else 0
            token_ids += [(right + 1) % self._vocab_size, (right + shift) % self._vocab_size]
            parents += [parent, parent]
            parent = len(token_ids) - 1
        return DraftTree(token_ids, parents, [0] * len(token_ids))

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def num_top_tokens(self, request_id: str) -> int:  # noqa: ARG002
        return 0

    def close(self, request_id: str) -> None: ...


def register_oracle(monkeypatch: pytest.MonkeyPatch, make: Callable[[], OracleDrafter]) -> None:
    """``oracle`` is a drafter like any other, for one test."""

    class Oracle(OracleDrafter):
        @classmethod
        def build(cls, context: DrafterContext) -> Drafter:
            del context
            return make()

    monkeypatch.setitem(REGISTERED, "oracle", Oracle)
    monkeypatch.setattr(registry, "_NAMES", (*registry._NAMES, "oracle"))


ORACLE = SpeculativeParams(
    draft_strategy="oracle",
    adaptive_depth="fixed",
    num_speculative_tokens=8,
    tree_strategy="tree",
    tree_width=2,
    tree_depth=4,
)


def write_all(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    speculative: SpeculativeParams = PLAIN,
    temperature: float = 0.0,
) -> tuple[list[list[int]], int]:
    """Returns the texts that the engine writes after each prompt, all at the same time, and how many of
    those tokens were drafts. Starts and stops the engine."""
    return asyncio.run(_write_all(engine, prompts, max_tokens, speculative, temperature))


async def _write_all(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    speculative: SpeculativeParams,
    temperature: float,
) -> tuple[list[list[int]], int]:
    num_accepted = 0

    async def read(index: int) -> list[int]:
        nonlocal num_accepted
        request = GenerationRequest(
            f"request-{index}",
            tuple(prompts[index]),
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index),
            speculative,
        )
        token_ids: list[int] = []
        async for event in engine.generate(request):
            token_ids += event.token_ids
            num_accepted += sum(event.drafted)
        return token_ids

    await engine.start()
    try:
        texts = await asyncio.gather(*(read(index) for index in range(len(prompts))))
    finally:
        await engine.stop()
    return texts, num_accepted
