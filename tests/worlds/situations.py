"""Situations in which requests have to write what they write alone. Each serves requests on a target and
shows that the situation came about."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from engine.core import EngineCore
from engine.request.params import PLAIN, GenerationRequest, SamplingParams
from worlds.engine_harness import Driver, Setup, drafting, request

WIDTHS = {"chain": 1, "tree": 3}
_NEIGHBOURS = ("none", "ngram", "nasd", "suffix", "stand", "recycling", "jacobi", "lookahead")
Signature = list[tuple[int, float]]
"""Tokens, and the exact log-probabilities they were given: a row that was computed in another way than
alone shows in these long before it changes a token."""


class Target(Protocol):
    """A model, prompts that it understands, and sizes with room for all requests at once."""

    prompts: Sequence[Sequence[int]]
    setup: Setup

    def core(self, setup: Setup) -> EngineCore:
        """An engine of these sizes."""


def signature(driver: Driver, request_id: str) -> Signature:
    return [(told.token_id, told.logprob) for told in driver.logprobs[request_id]]


def plain(target: Target, each: GenerationRequest) -> Driver:
    """Serves the request at gamma 0, alone, its prompt in as few pieces as there can be."""
    return Driver(target.core(target.setup)).run(replace(each, speculative=PLAIN))


def partly_right(text: Sequence[int]) -> tuple[int, ...]:
    """A prediction of the text with every seventh token wrong."""
    return tuple(t ^ 1 if index % 7 == 6 else t for index, t in enumerate(text))


def neighbours(target: Target, num: int, prefix: str = "neighbour") -> list[GenerationRequest]:
    """Requests with other prompts, seeds, drafters, lengths and temperatures."""
    rng = random.Random(num)
    return [
        request(
            f"{prefix}-{index}",
            target.prompts[index % len(target.prompts)][rng.randrange(3) :][: rng.randrange(3, 20)],
            SamplingParams(rng.randrange(4, 20), temperature=index % 2 * 0.8, seed=index),
            drafting(_NEIGHBOURS[index % len(_NEIGHBOURS)], "fixed", 5, 1 + index % 3),
        )
        for index in range(num)
    ]


def alone(target: Target, requests: Sequence[GenerationRequest]) -> Driver:
    """One after the other; the first of each prompt computes it, which is dear."""
    driver = Driver(target.core(target.setup))
    for each in requests:
        driver.run(each)
    return driver


def mixed_batch(target: Target, requests: Sequence[GenerationRequest]) -> Driver:
    driver = Driver(target.core(target.setup)).run(*neighbours(target, 4), *requests)
    assert max(stats.num_running for stats in driver.stats) > len(requests) // 2
    return driver


def chunked(target: Target, requests: Sequence[GenerationRequest]) -> Driver:
    lengths = [len(prompt) for prompt in target.prompts]
    size = max(lengths) // 5 | 1
    num_rows = 3 * size + 25
    setup = target.setup.but(
        prefill_chunk=size,
        max_num_batched_tokens=num_rows,
        max_num_seqs=min(target.setup.max_num_seqs, num_rows // 4),
        prefix_cache=False,
    )
    driver = Driver(target.core(setup)).run(*requests)
    assert min(driver.first_step[each.request_id] for each in requests) >= -(-min(lengths) // size)
    return driver


def prefix_hit(target: Target, requests: Sequence[GenerationRequest]) -> Driver:
    driver = Driver(target.core(target.setup))
    some = SamplingParams(6, temperature=0.0)
    driver.run(*(request(f"first-{i}", prompt) for i, prompt in enumerate(target.prompts)))
    # Heads have rows only of texts that they drafted for, and several take them from each other.
    heads = {
        name: each.speculative
        for each in requests
        if _has_rows(driver, name := each.speculative.draft_strategy)
    }
    for name, way in heads.items():
        asked = enumerate(target.prompts)
        driver.run(*(request(f"first-{name}-{i}", prompt, some, way) for i, prompt in asked))
    driver.run(*requests)
    # Long prompts may have lost blocks to each other meanwhile.
    contended = heads if len(heads) > 1 else {}
    sure = [each for each in requests if each.speculative.draft_strategy not in contended]
    num_whole = 0
    for each in sure:
        num_cached = driver.finishes[each.request_id].num_cached_tokens
        assert num_cached > 0
        num_whole += num_cached >= len(each.prompt_token_ids) - target.setup.block_size
    assert num_whole > len(sure) // 2
    return driver


def _has_rows(driver: Driver, drafter: str) -> bool:
    named = driver.core.speculation.drafters[drafter]
    needs = [each.info.needs for each in (named, *named.companions(False))]
    return any(each.hidden_rows and each.draft_slots for each in needs)


def preempted(
    target: Target, requests: Sequence[GenerationRequest], prefix_cache: bool = False
) -> Driver:
    """Blocks for about three requests, and now and then somebody important."""
    longest = max(len(each.prompt_token_ids) + each.sampling.max_tokens for each in requests)
    num_blocks = 3 * -(-longest // target.setup.block_size)
    setup = target.setup.but(num_blocks=num_blocks, prefix_cache=prefix_cache)
    driver = Driver(target.core(setup))
    driver.submit(*requests)
    for index in range(len(requests) // 2 + 2):
        for _ in range(4):
            driver.step()
        prompt = target.prompts[index % len(target.prompts)]
        driver.submit(request(f"important-{index}", prompt, priority=-1))
    driver.run()
    times = [driver.finishes[each.request_id] for each in requests]
    assert sum(each.num_preemptions > 0 for each in times) > len(requests) // 4
    return driver


def aborted_neighbours(target: Target, requests: Sequence[GenerationRequest]) -> Driver:
    """Those that are aborted share the subjects' prompts, and with them the blocks."""
    driver = Driver(target.core(target.setup))
    endless = SamplingParams(max_tokens=99, ignore_eos=True)
    doomed = [
        replace(each, prompt_token_ids=tuple(prompt), sampling=endless)
        for each, prompt in zip(neighbours(target, 8, "doomed"), 8 * target.prompts, strict=False)
    ]
    driver.submit(*doomed, *requests)
    for each in doomed:
        driver.step()
        driver.core.abort(each.request_id)
    driver.step()  # tells of the last abort, even if nothing else is left
    driver.run()
    assert all(driver.finishes[each.request_id].reason == "abort" for each in doomed)
    return driver


SITUATIONS: dict[str, Callable[[Target, Sequence[GenerationRequest]], Driver]] = {
    "alone": alone,
    "mixed_batch": mixed_batch,
    "chunked": chunked,
    "prefix_hit": prefix_hit,
    "preempted": preempted,
    "preempted_with_cache": partial(preempted, prefix_cache=True),
    "aborted_neighbours": aborted_neighbours,
}
LARGE = ("alone", "mixed_batch", "chunked", "prefix_hit", "preempted")
"""Situations for models whose steps are dear."""
