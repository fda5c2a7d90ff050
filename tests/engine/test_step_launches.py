"""Counts a step's launches beside its forward's graph, on a CPU that passes for a device; and tokens
chosen within the graph are those of every other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.attention.backend import AttentionNeeds
from engine.capture.replays import DeviceGraphs, GraphSizes
from engine.core import EngineCore
from engine.model.runner import ModelRunner
from engine.request.params import PLAIN, GenerationRequest, SamplingParams
from kvpool.store import KVStore
from worlds.device_world import no_host
from worlds.engine_harness import (
    TINY_VOCAB,
    Driver,
    Setup,
    TinyTarget,
    build_core,
    circle_prompt,
    drafting,
    request,
)
from worlds.graph_maker import ReplayingMaker
from worlds.interpreted import ON_CPU, patching_once
from worlds.launches import counting_launches
from worlds.static_attention import StaticAttention

pytestmark = ON_CPU

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
KINDS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "truncated": replace(SAMPLED, top_p=0.8, top_k=9),
    "held": replace(SAMPLED, min_tokens=5),
    "penalised": replace(GREEDY, repetition_penalty=1.2),
    "scored": replace(SAMPLED, logprobs=2),
}


class GraphedTarget(TinyTarget):
    """Whose steps are graphs' replays, ``chooses`` or not. ``names``: of what was launched outside of
    them and beside their inputs."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.maker, self._chooses = ReplayingMaker(), chooses
        self.names: list[str] = []

    def core(self, setup: Setup) -> EngineCore:
        core = build_core(self._runner(setup), TINY_VOCAB, setup)
        core._chooses = self._chooses
        return core

    def _runner(self, setup: Setup) -> ModelRunner:
        needs = AttentionNeeds.of(self._model, self._shapes, "fast", setup.block_size)
        store = KVStore(num_blocks=setup.num_blocks, device="cpu", **needs.store_sizes())
        runner = ModelRunner(self._model, StaticAttention(store, needs))
        replays = DeviceGraphs(
            runner._planned, runner.attention, self.maker, GraphSizes(8, 4, 64, 8)
        )
        runner._replays = replays
        runner.prepare(chooses=self._chooses)
        for bucket, graph in replays._graphs.items():
            replays._graphs[bucket] = graph._replace(replay=self._uncounted(graph.replay))
        runner._plan = self._uncounted(runner._plan)  # type: ignore[method-assign]
        return runner

    def _uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def uncounted(*arguments: Any) -> Any:
            count = len(self.names)
            result = function(*arguments)
            del self.names[count:]
            return result

        return uncounted

    def last_step(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Names of what the last but one of many steps launched: plain decoding."""
        with no_host(), patching_once():
            core = self.core(Setup(max_num_batched_tokens=60))
            for each in requests:
                core.submit(core.prepare(each))
            for _ in range(6):
                core.step()
            with counting_launches() as self.names:
                core.step()
                return [name for name in self.names if name != "aten::to"]


def asked(kind: str, count: int, **changes: Any) -> list[GenerationRequest]:
    params = replace(KINDS[kind], **changes)
    return [request(f"{kind} {at}", circle_prompt(at), params) for at in range(count)]


OUTSIDE = {"greedy": (1, 4), "sampled": (1, 3), "truncated": (43, 43), "scored": (18, 20)}
"""Launches outside of a graph that chooses tokens, and of one that does not, but for conversions and
uploads, which are none on a CPU."""


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_launches_outside_of_graphs(kind: str, count: int) -> None:
    found = [GraphedTarget(chooses).last_step(asked(kind, count)) for chooses in (True, False)]
    assert tuple(map(len, found)) == OUTSIDE[kind]


def every_kind(ways: Sequence[str]) -> list[GenerationRequest]:
    drafts = {"none": PLAIN, "chain": drafting("ngram", ngram_min=1), "tree": drafting("nasd")}
    return [
        request(f"{kind}, {way}", circle_prompt(at), params, drafts[way])
        for at, (kind, params) in enumerate(KINDS.items())
        for way in ways
    ]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("ways", [["none"], ["chain", "none", "tree"]])
def test_texts_are_those_of_tokens_chosen_outside(ways: list[str], runs_ahead: bool) -> None:
    requests = every_kind(ways)
    setup = Setup(
        max_num_seqs=4, max_num_batched_tokens=60, runs_ahead=runs_ahead, check_integrity=True
    )
    usual = Driver(TinyTarget().core(setup.but(runs_ahead=False))).run(*requests)
    with no_host(), patching_once():
        target = GraphedTarget(chooses=True)
        found = Driver(target.core(setup)).run(*requests)
    assert target.maker.num_replays > 10
    assert found.token_ids == usual.token_ids


def test_a_step_that_waits_to_know_where_its_rows_lie_chooses_their_tokens_all_the_same() -> None:
    """On attention that cannot take rows of which only the device knows where they lie."""
    copied = drafting("ngram", num_tokens=4, ngram_min=1)
    requests = [
        request("copies", circle_prompt(1), replace(GREEDY, max_tokens=30), copied),
        request("other", circle_prompt(2), replace(SAMPLED, max_tokens=30)),
    ]
    usual = Driver(TinyTarget().core(Setup())).run(*requests)
    with no_host(), patching_once():
        core = GraphedTarget(chooses=True).core(Setup(runs_ahead=True))
        found = Driver(core).run(*requests)
    assert found.token_ids == usual.token_ids
    assert found.finishes["copies"].speculative.num_accepted_tokens > 0
