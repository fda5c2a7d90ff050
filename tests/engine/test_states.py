"""Models whose layers keep a state, served: what is begun behind a snapshot is written as if it were not,
and whatever ends a request leaves the states of others as they were."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.batch import ForwardOutput, InputBatch
from engine.build import build_engine_for
from engine.build.sizes import sizes_of_states
from engine.config import EngineConfig
from engine.model.loader import attach_attention
from engine.request.errors import UnsupportedModelError
from engine.request.info import StatesInfo
from engine.request.params import GenerationRequest, SamplingParams
from engine.states.build import LEAST_PLACES
from worlds.engine_driver import ORACLE, OracleDrafter, register_oracle
from worlds.engine_harness import ErrorDriver, request
from worlds.tiny_models import VOCAB_SIZE, greedy_text, random_ids, reference_model, tiny_model

SIZE, NUM_WRITTEN = 4, 14
PROMPTS = [random_ids(seed, count) for seed, count in ((1, 19), (2, 12), (3, 24))]
families = pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])


@cache
def alone(name: str, prompt: tuple[int, ...]) -> list[int]:
    """Returns the text that transformers writes, without any cache."""
    return greedy_text(reference_model(name), prompt, NUM_WRITTEN)


def asked(request_id: str, prompt: list[int]) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=NUM_WRITTEN, temperature=0.0)
    return request(request_id, prompt, sampling, ORACLE)


def driver_of(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ErrorDriver:
    """Its drafts are trees, of the texts that follow ``PROMPTS``."""
    texts = [prompt + alone(name, tuple(prompt)) for prompt in PROMPTS]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    sizes: dict[str, Any] = {
        **{"block_size": SIZE, "num_blocks": 64, "max_num_batched_tokens": 48, "max_num_seqs": 3},
        **{"prefill_chunk": 9, "state_snapshot_tokens": 8, "check_integrity": True},
    }
    config = EngineConfig(**sizes | changes)
    return ErrorDriver(build_engine_for(tiny_model(name), None, config).core)


def check(driver: ErrorDriver, name: str, **prompts: list[int]) -> None:
    """These requests, all at once, are answered as each would be alone, and hold nothing any more."""
    driver.run(*(asked(each, prompt) for each, prompt in prompts.items()))
    for each, prompt in prompts.items():
        assert driver.token_ids[each] == alone(name, tuple(prompt)), each
    states = driver.core.pool.states
    assert states is not None
    counts = states.counts()
    assert counts["seat"] == counts["planned"] == 0
    assert counts["free"] + counts["snapshot"] == states.num_slots
    assert len(states._places) == states.num_places


@families
def test_a_conversation_goes_on_where_it_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(name, monkeypatch)
    check(driver, name, first=PROMPTS[0])
    assert driver.finishes["first"].speculative.num_accepted_tokens > NUM_WRITTEN / 2
    text = PROMPTS[0] + driver.token_ids["first"]
    check(driver, name, second=text + PROMPTS[1][:5], same=PROMPTS[0], other=PROMPTS[0][:15] + [5])
    cached = {each: info.num_cached_tokens for each, info in driver.finishes.items()}
    # The newest token, and drafts that the last step accepted, are not in any slot.
    assert len(text) - cached["second"] <= (SIZE - 1) + 1 + ORACLE.tree_depth
    assert cached["same"] == (len(PROMPTS[0]) - 1) // SIZE * SIZE
    assert cached["other"] == 8  # an interval's end
    assert cached["first"] == 0
    assert sum(stats.state_hits for stats in driver.stats) == 3
    num_slots = {sum(stats.state_slots.values()) for stats in driver.stats}
    assert num_slots == {driver.core.pool.states.num_slots}  # type: ignore[union-attr]
    assert max(stats.state_slots["seat"] for stats in driver.stats) == 3


@families
def test_preempted_requests_write_their_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(name, monkeypatch, num_blocks=17)
    check(driver, name, a=PROMPTS[0], b=PROMPTS[1], c=PROMPTS[2])
    assert sum(stats.num_preemptions for stats in driver.stats) > 0
    check(driver, name, d=PROMPTS[2], e=PROMPTS[0])


@families
def test_aborts_leave_states_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_steps in (1, 2, 5):
        driver = driver_of(name, monkeypatch)
        driver.submit(*(asked(each, prompt) for each, prompt in zip("abc", PROMPTS, strict=True)))
        for _ in range(num_steps):
            driver.step()
        driver.core.abort("b")
        check(driver, name, d=PROMPTS[1])
        for each, prompt in (("a", PROMPTS[0]), ("c", PROMPTS[2])):
            assert driver.token_ids[each] == alone(name, tuple(prompt))
        assert driver.finishes["b"].reason == "abort"


@families
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "behind"])
def test_a_step_that_breaks_leaves_no_state_behind(
    name: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward raises once: before it has written anything, or when it has written everything."""
    driver = driver_of(name, monkeypatch, max_num_seqs=2)
    check(driver, name, before=PROMPTS[0])
    forward, left = driver.core.runner.forward, [4]

    def breaking(batch: InputBatch) -> ForwardOutput:
        left[0] -= 1
        if left[0] == 0 and not is_late:
            raise RuntimeError("no room")
        output = forward(batch)
        if left[0] == 0:
            raise RuntimeError("no room")
        return output

    monkeypatch.setattr(driver.core.runner, "forward", breaking)
    driver.run(*(asked(each, prompt) for each, prompt in zip("abc", PROMPTS, strict=True)))
    assert {*driver.errors} == {"a", "b"}
    assert driver.token_ids["c"] == alone(name, tuple(PROMPTS[2]))
    check(driver, name, d=PROMPTS[0], e=PROMPTS[1])
    assert driver.finishes["d"].num_cached_tokens == 0
    check(driver, name, f=PROMPTS[0])
    assert driver.finishes["f"].num_cached_tokens == 16


def test_what_states_are_not_served_with_is_refused_by_name() -> None:
    model = tiny_model("lfm2")
    attach_attention(model)
    config = EngineConfig(num_blocks=8, tensor_parallel_size=2)
    with pytest.raises(UnsupportedModelError, match="^tensor_parallel_size: not for models whose"):
        sizes_of_states(model, config)


@pytest.mark.parametrize("changes", [{"max_num_batched_tokens": 2}, {"max_num_nodes": 1}])
def test_what_is_checked_at_start_has_places_however_few_drafts_there_are(changes: Any) -> None:
    """Without them it would write behind the memory of states."""
    config = EngineConfig(block_size=SIZE, num_blocks=99, max_num_seqs=1, **changes)
    model = tiny_model("nemotron_h")
    attach_attention(model)
    sizes = sizes_of_states(model, config)
    assert sizes is not None
    assert sizes.num_places >= LEAST_PLACES
    build_engine_for(tiny_model("nemotron_h"), None, config)


def test_the_engine_says_what_room_states_have() -> None:
    config = EngineConfig(block_size=SIZE, num_blocks=8, max_num_seqs=2, state_snapshot_tokens=9)
    info = build_engine_for(tiny_model("qwen3_5_text"), None, config).info.states
    # A layer of 4 heads of 16 x 16, and 128 channels whose last 3 inputs are kept.
    assert info == StatesInfo(2, 16, 4 * (4 * 16 * 16 + 3 * 128), 12)
