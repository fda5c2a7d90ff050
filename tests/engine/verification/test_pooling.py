"""Embeddings are what transformers' own hidden states come to, however steps cut the text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from drafters.base import NORMED
from engine.request.params import GenerationRequest, Pooling, SamplingParams
from worlds.engine_harness import Driver, Setup, TinyTarget, circle_prompt, drafting, request
from worlds.tiny_models import own_states

TOLERANCE = 1e-5
"""For numbers of a vector of length 1; both models compute in fp32, in another order."""
POOLINGS: list[Pooling] = ["mean", "last"]
READS = Setup(hidden_layers=(NORMED,), check_integrity=True)


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget()


def pooled(name: str, prompt: list[int], pooling: Pooling) -> GenerationRequest:
    return replace(request(name, prompt, SamplingParams(max_tokens=1)), pooling=pooling)


def expected(target: TinyTarget, prompt: list[int], pooling: Pooling) -> NDArray[np.float32]:
    states = own_states(target.reference, prompt)[NORMED]
    vector = states.mean(dim=0) if pooling == "mean" else states[-1]
    found: NDArray[np.float32] = torch.nn.functional.normalize(vector, dim=0).numpy()
    return found


def embedding_of(driver: Driver, name: str) -> NDArray[np.float32]:
    finish = driver.finishes[name]
    assert finish.embedding is not None
    return np.frombuffer(finish.embedding, dtype="<f4")


def distance(driver: Driver, name: str, wanted: NDArray[np.float32]) -> float:
    return float(np.abs(embedding_of(driver, name) - wanted).max())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("prefill_chunk", [1, 7, 64])
def test_an_embedding_is_that_of_transformers_whatever_the_chunks(
    target: TinyTarget, pooling: Pooling, prefill_chunk: int
) -> None:
    prompts = {f"p{index}": circle_prompt(index)[: 24 - 5 * index] for index in range(3)}
    driver = Driver(target.core(READS.but(prefill_chunk=prefill_chunk)))
    driver.run(*(pooled(name, prompt, pooling) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert distance(driver, name, expected(target, prompt, pooling)) < TOLERANCE
        assert abs(np.linalg.norm(embedding_of(driver, name)) - 1) < TOLERANCE
        assert driver.token_ids[name] == []
        finish = driver.finishes[name]
        assert (finish.reason, finish.num_output_tokens) == ("stop", 0)
        assert finish.num_prompt_tokens == len(prompt)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_neither_texts_nor_embeddings_mind_each_other(target: TinyTarget, pooling: Pooling) -> None:
    texts = [
        request(f"t{index}", circle_prompt(index), SamplingParams(32, 0.0), drafting("ngram"))
        for index in range(3)
    ]
    alone = Driver(target.core(READS)).run(*texts)
    driver = Driver(target.core(READS.but(prefill_chunk=5)))
    prompts = {f"p{index}": circle_prompt(index + 5) for index in range(3)}
    driver.run(*texts, *(pooled(name, prompt, pooling) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert distance(driver, name, expected(target, prompt, pooling)) < TOLERANCE
    for each in texts:
        assert driver.token_ids[each.request_id] == alone.token_ids[each.request_id]
        assert driver.finishes[each.request_id].embedding is None
    assert sum(map(sum, driver.drafted.values())) > 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_was_pooled_before_a_preemption_counts_once(
    target: TinyTarget, pooling: Pooling
) -> None:
    """A better priority takes the blocks of a text that is half pooled."""
    long = [*circle_prompt(1), *circle_prompt(2)]
    setup = READS.but(num_blocks=13, prefill_chunk=6, prefix_cache=False, max_num_seqs=1)
    driver = Driver(target.core(setup))
    driver.submit(pooled("long", long, pooling))
    for _ in range(3):
        driver.step()
    driver.run(request("urgent", circle_prompt(3), SamplingParams(4, 0.0), priority=-1))
    assert driver.finishes["long"].num_preemptions == 1
    assert distance(driver, "long", expected(target, long, pooling)) < TOLERANCE


def test_a_mean_takes_no_row_from_the_prefix_cache_and_the_last_state_does(
    target: TinyTarget,
) -> None:
    prompt = circle_prompt(1)
    driver = Driver(target.core(READS)).run(pooled("first", prompt, "mean"))
    driver.run(pooled("again", prompt, "mean"))
    driver.run(pooled("last", prompt, "last"))
    driver.run(request("text", prompt, SamplingParams(2, 0.0)))
    cached = {name: finish.num_cached_tokens for name, finish in driver.finishes.items()}
    assert cached == {"first": 0, "again": 0, "last": 20, "text": 20}
    assert distance(driver, "again", embedding_of(driver, "first")) == 0
    assert distance(driver, "last", expected(target, prompt, "last")) < TOLERANCE


def test_an_end_of_sequence_token_does_not_matter(target: TinyTarget) -> None:
    prompt = circle_prompt(1)
    wanted = expected(target, prompt, "mean")
    every = READS.but(eos_token_ids=tuple(range(64)))
    driver = Driver(target.core(every)).run(pooled("p", prompt, "mean"))
    assert driver.finishes["p"].stop_token_id is None
    assert distance(driver, "p", wanted) < TOLERANCE
