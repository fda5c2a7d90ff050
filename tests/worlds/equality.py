"""The situations, samplings and drafters under which texts have to be equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.request.params import PLAIN, GenerationRequest, SamplingParams
from worlds.engine_harness import (
    DictatedCost,
    Driver,
    Setup,
    TinyTarget,
    circle_prompt,
    drafting,
    request,
)

NUM_TOKENS = 24


NUM_PROMPTS = 4


SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "t07_top_p": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.9),
    "t13": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.3),
}


DRAFTERS = (
    "none",
    "ngram",
    "nasd_one_level",
    "nasd",
    "suffix",
    "stand",
    "recycling",
    "jacobi",
    "lookahead",
    "prediction",
    "grammar",
    "auto",
)


WIDTHS = {"chain": 1, "tree": 3}


def partly_right(text: Sequence[int]) -> tuple[int, ...]:
    """A prediction of the text with every seventh token wrong."""
    return tuple(t ^ 1 if index % 7 == 6 else t for index, t in enumerate(text))


def neighbours(num: int, prefix: str = "neighbour") -> list[GenerationRequest]:
    """Requests with other prompts, seeds, drafters, lengths and temperatures."""
    rng = random.Random(num)
    return [
        request(
            f"{prefix}-{index}",
            circle_prompt(100 + index)[: rng.randrange(3, 20)],
            SamplingParams(
                max_tokens=rng.randrange(4, 20), temperature=index % 2 * 0.8, seed=index
            ),
            drafting(DRAFTERS[index % len(DRAFTERS)], "fixed", 5, 1 + index % 3),
        )
        for index in range(num)
    ]


def alone(target: TinyTarget, requests: Sequence[GenerationRequest]) -> Driver:
    """One core each; the returned driver holds all streams."""
    together = Driver(target.core(Setup()))
    for each in requests:
        driver = Driver(target.core(Setup())).run(each)
        together.token_ids |= driver.token_ids
        together.finishes |= driver.finishes
    return together


def mixed_batch(target: TinyTarget, requests: Sequence[GenerationRequest]) -> Driver:
    setup = Setup(max_num_seqs=32, max_num_batched_tokens=256, cost=DictatedCost(row_seconds=0.001))
    driver = Driver(target.core(setup)).run(*neighbours(4), *requests)
    assert max(stats.num_running for stats in driver.stats) > len(requests) // 2
    return driver


def chunked(target: TinyTarget, requests: Sequence[GenerationRequest]) -> Driver:
    setup = Setup(prefill_chunk=5, max_num_seqs=6, max_num_batched_tokens=40, prefix_cache=False)
    driver = Driver(target.core(setup)).run(*requests)
    num_chunks = -(-len(circle_prompt(0)) // 5)
    assert min(driver.first_step[each.request_id] for each in requests) >= num_chunks
    return driver


def prefix_hit(target: TinyTarget, requests: Sequence[GenerationRequest]) -> Driver:
    driver = Driver(target.core(Setup(max_num_seqs=4)))
    driver.run(*(request(f"first-{index}", circle_prompt(index)) for index in range(NUM_PROMPTS)))
    driver.run(*requests)
    for each in requests:
        assert driver.finishes[each.request_id].num_cached_tokens >= len(circle_prompt(0)) - 4
    return driver


def preempted(
    target: TinyTarget, requests: Sequence[GenerationRequest], prefix_cache: bool
) -> Driver:
    """Blocks for about three requests, and now and then somebody important."""
    setup = Setup(num_blocks=36, max_num_seqs=6, prefix_cache=prefix_cache)
    driver = Driver(target.core(setup))
    driver.submit(*requests)
    for important in neighbours(12, "important"):
        for _ in range(4):
            driver.step()
        driver.submit(replace(important, priority=-1))
    driver.run()
    finishes = [driver.finishes[each.request_id] for each in requests]
    num_preempted = sum(finish.num_preemptions > 0 for finish in finishes)
    assert num_preempted > len(requests) // 3
    return driver


def aborted_neighbours(target: TinyTarget, requests: Sequence[GenerationRequest]) -> Driver:
    setup = Setup(max_num_seqs=32, max_num_batched_tokens=256)
    driver = Driver(target.core(setup))
    doomed = neighbours(8, "doomed")
    # Some share a subject's prompt, and with it the blocks.
    doomed = [
        replace(
            each,
            prompt_token_ids=tuple(circle_prompt(index)),
            sampling=SamplingParams(max_tokens=99),
        )
        for index, each in enumerate(doomed)
    ]
    driver.submit(*doomed, *requests)
    for each in doomed:
        driver.step()
        driver.core.abort(each.request_id)
    driver.step()  # tells of the last abort, even if nothing else is left
    driver.run()
    assert all(driver.finishes[each.request_id].reason == "abort" for each in doomed)
    return driver


SITUATIONS: dict[str, Callable[[TinyTarget, Sequence[GenerationRequest]], Driver]] = {
    "alone": alone,
    "mixed_batch": mixed_batch,
    "chunked_prompt": chunked,
    "prefix_hit": prefix_hit,
    "preempted": partial(preempted, prefix_cache=False),
    "preempted_with_cache": partial(preempted, prefix_cache=True),
    "aborted_neighbours": aborted_neighbours,
}


def plain(target: TinyTarget, each: GenerationRequest) -> list[int]:
    """The stream at gamma 0, alone, from a core of its own."""
    driver = Driver(target.core(Setup())).run(replace(each, speculative=PLAIN))
    return driver.token_ids[each.request_id]
