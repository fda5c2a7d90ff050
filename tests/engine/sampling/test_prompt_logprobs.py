"""The log-probabilities of a prompt's own tokens (echo), however the prompt came to be computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.request.params import GenerationRequest, SamplingParams
from worlds.engine_harness import Driver, Setup, TinyTarget, circle_prompt, drafting, request

NUM_TOP = 3
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=NUM_TOP)
PROMPT = circle_prompt(0)


def asking(name: str = "r", **changes: object) -> GenerationRequest:
    each = request(name, PROMPT, SAMPLING, drafting("ngram"))
    return replace(each, **changes)  # type: ignore[arg-type]


def expect_told(target: TinyTarget, driver: Driver, each: GenerationRequest) -> None:
    """Once, for every token but the first, as transformers' own forward has them."""
    (told,) = driver.prompt_logprobs[each.request_id]
    prompt = list(each.prompt_token_ids)
    logprobs = target.logits(prompt).log_softmax(dim=-1).tolist()
    assert told[0] is None
    assert len(told) == len(prompt)
    for position, one in enumerate(told[1:], start=1):
        assert one is not None
        before = logprobs[position - 1]
        assert one.token_id == prompt[position]
        assert one.logprob == pytest.approx(before[one.token_id], abs=1e-5)
        best = sorted(before, reverse=True)[:NUM_TOP]
        assert [value for _, value in one.top] == pytest.approx(best, abs=1e-5)
    assert driver.token_ids[each.request_id] == target.recomputed(each, SAMPLING.max_tokens)


@pytest.mark.parametrize("prefill_chunk", [1, 5, 23, 24, 64])
def test_prompt_in_any_chunks(tiny_target: TinyTarget, prefill_chunk: int) -> None:
    driver = Driver(tiny_target.core(Setup(prefill_chunk=prefill_chunk))).run(asking())
    expect_told(tiny_target, driver, asking())


def test_beside_others_that_ask_and_do_not(tiny_target: TinyTarget) -> None:
    core = tiny_target.core(Setup(prefill_chunk=7, max_num_batched_tokens=20))
    others = [
        request("plain", circle_prompt(3), replace(SAMPLING, prompt_logprobs=None)),
        asking("second", prompt_token_ids=tuple(circle_prompt(2)[:11])),
    ]
    driver = Driver(core).run(others[0], asking(), others[1])
    expect_told(tiny_target, driver, asking())
    expect_told(tiny_target, driver, others[1])
    assert driver.prompt_logprobs["plain"] == []


def test_cached_prompt_is_computed_again(tiny_target: TinyTarget) -> None:
    """Rows that are not run have no logits."""
    driver = Driver(tiny_target.core(Setup()))
    driver.run(request("before", PROMPT))
    driver.run(asking())
    expect_told(tiny_target, driver, asking())
    assert driver.finishes["r"].num_cached_tokens == 0
    driver.run(request("after", PROMPT))
    assert driver.finishes["after"].num_cached_tokens > 0


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_prompt_interrupted_half_way(
    tiny_target: TinyTarget, num_steps: int, prefix_cache: bool
) -> None:
    setup = Setup(prefill_chunk=5, max_num_seqs=1, prefix_cache=prefix_cache)
    driver = Driver(tiny_target.core(setup))
    driver.submit(asking())
    for _ in range(num_steps):
        driver.step()
    assert driver.token_ids["r"] == []
    driver.run(request("important", circle_prompt(1), priority=-1))
    assert driver.finishes["r"].num_preemptions == 1
    expect_told(tiny_target, driver, asking())


def test_interrupted_after_the_prompt_is_told_once(tiny_target: TinyTarget) -> None:
    driver = Driver(tiny_target.core(Setup(max_num_seqs=1)))
    driver.submit(asking(speculative=drafting("none")))
    for _ in range(3):
        driver.step()
    assert len(driver.token_ids["r"]) == 3
    driver.run(request("important", circle_prompt(1), priority=-1))
    assert driver.finishes["r"].num_preemptions == 1
    expect_told(tiny_target, driver, asking())


def test_prompt_of_one_token_has_none_to_tell(tiny_target: TinyTarget) -> None:
    each = asking(prompt_token_ids=(9,))
    driver = Driver(tiny_target.core(Setup())).run(each)
    assert driver.prompt_logprobs["r"] == [(None,)]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_named_tokens_have_the_whole_distributions_figures(
    tiny_target: TinyTarget, drafter: str
) -> None:
    """At every place of prompt and output, beside a request that names none."""
    named = (7, 63, 0)
    sampling = replace(SAMPLING, logprob_token_ids=named)
    each = asking(sampling=sampling, speculative=drafting(drafter))
    driver = Driver(tiny_target.core(Setup())).run(each, asking("other"))
    text = [*PROMPT, *driver.token_ids["r"]]
    full = tiny_target.logits(text).log_softmax(dim=-1).tolist()
    (of_prompt,) = driver.prompt_logprobs["r"]
    told = [*of_prompt[1:], *driver.logprobs["r"]]
    assert len(told) == len(text) - 1
    for before, one in zip(full, told, strict=False):
        assert one is not None
        assert [token_id for token_id, _ in one.named] == list(named)
        expected = [before[token_id] for token_id in named]
        assert [value for _, value in one.named] == pytest.approx(expected, abs=1e-4)
    assert all(one.named == () for one in driver.logprobs["other"])
    assert [(one.logprob, one.top) for one in driver.logprobs["other"]] == [
        (one.logprob, one.top) for one in driver.logprobs["r"]
    ]
