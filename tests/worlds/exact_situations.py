"""Situations in which a model read from files has to write the bits that it writes alone.

Not only tokens are compared but the bits of their log-probabilities: a row that was computed in
another way than alone would show long before it changes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from engine.core import EngineCore
from engine.request.params import PLAIN, GenerationRequest, SamplingParams
from worlds.engine_harness import Driver, Setup, drafting, request

SETUP = Setup(
    num_blocks=160, block_size=16, max_model_len=1024, prefill_chunk=512, max_num_batched_tokens=640
)
_CHUNK = 23
Signature = list[tuple[int, float]]
"""Tokens, and the exact log-probabilities they were given."""


class ExactTarget(Protocol):
    """A model in exact mode, with prompts that it understands. ``setup``: sizes with room for all
    requests at once."""

    prompts: Sequence[Sequence[int]]
    setup: Setup

    def core(self, setup: Setup) -> EngineCore:
        """Of these sizes, with ends of text and grammars as the model has them."""


def signature(driver: Driver, request_id: str) -> Signature:
    return [(told.token_id, told.logprob) for told in driver.logprobs[request_id]]


def plain(target: ExactTarget, each: GenerationRequest) -> Signature:
    """What the request writes at gamma 0, alone, its prompt in as few pieces as there can be."""
    bare = replace(each, speculative=PLAIN)
    return signature(Driver(target.core(target.setup)).run(bare), each.request_id)


def alone(target: ExactTarget, requests: Sequence[GenerationRequest]) -> Driver:
    """One after the other; the first of each prompt computes it, which is dear."""
    driver = Driver(target.core(target.setup))
    for each in requests:
        driver.run(each)
    return driver


def mixed_batch(target: ExactTarget, requests: Sequence[GenerationRequest]) -> Driver:
    sampling = SamplingParams(max_tokens=60, temperature=1.3, ignore_eos=True)
    odd = request("odd", target.prompts[0][:37], sampling, drafting("ngram"))
    driver = Driver(target.core(target.setup)).run(odd, *requests)
    assert max(stats.num_running for stats in driver.stats) > len(requests) // 2
    return driver


def chunked(target: ExactTarget, requests: Sequence[GenerationRequest]) -> Driver:
    setup = target.setup.but(prefill_chunk=_CHUNK, max_num_batched_tokens=70, prefix_cache=False)
    driver = Driver(target.core(setup)).run(*requests)
    least = len(min(target.prompts, key=len)) // _CHUNK
    assert min(driver.first_step.values()) > least
    return driver


def prefix_hit(target: ExactTarget, requests: Sequence[GenerationRequest]) -> Driver:
    driver = Driver(target.core(target.setup))
    driver.run(*(request(f"first-{i}", prompt) for i, prompt in enumerate(target.prompts)))
    driver.run(*requests)
    assert min(driver.finishes[each.request_id].num_cached_tokens for each in requests) > 0
    return driver


def preempted(target: ExactTarget, requests: Sequence[GenerationRequest]) -> Driver:
    """Blocks for about three requests, and now and then somebody important."""
    longest = max(len(prompt) for prompt in target.prompts)
    num_blocks = 3 * (longest // target.setup.block_size + 3)
    setup = target.setup.but(num_blocks=num_blocks, prefix_cache=False)
    driver = Driver(target.core(setup))
    driver.submit(*requests)
    for index in range(4):
        for _ in range(5):
            driver.step()
        driver.submit(request(f"important-{index}", target.prompts[0], priority=-1))
    driver.run()
    times = [driver.finishes[each.request_id] for each in requests]
    assert sum(each.num_preemptions for each in times) > 1
    return driver


SITUATIONS: dict[str, Callable[[ExactTarget, Sequence[GenerationRequest]], Driver]] = {
    function.__name__: function for function in (alone, mixed_batch, chunked, prefix_hit, preempted)
}
