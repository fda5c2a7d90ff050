"""An engine whose evicted blocks are kept elsewhere writes what it writes without, finds its prefixes
after a restart and after preemptions, and drafts as well as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from drafters.base import Drafter
from engine.core import EngineCore
from engine.model.runner import ModelRunner
from engine.offload.rows import BlockRows, parts_of
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from kvpool.saving import save_all, save_some
from kvpool.slot_file import SlotFile
from kvpool.tier import BlockTier, MemorySlots
from worlds.engine_harness import Driver, Setup, circle_prompt, drafting, request, traces_of
from worlds.every_drafter import EveryDrafterTarget
from worlds.trained_heads import HIDDEN_SIZE

LONG = [token for index in range(4) for token in circle_prompt(index)]  # 96 tokens: 24 blocks
OWN_ROWS = ("small_model", "eagle3", "eagle3_qwen3", "p_eagle", "mtp", "dflash", "dspark")
STRATEGIES = {
    "none": PLAIN,
    "ngram": drafting("ngram", num_tokens=4),
    "prefix_layers": drafting("prefix_layers", num_tokens=3, min_confidence=0.0),
    "auto": drafting("auto", num_tokens=4),
} | {name: drafting(name, num_tokens=3, min_confidence=0.0) for name in OWN_ROWS}
Make = Callable[[ModelRunner, Mapping[str, Drafter]], BlockTier]


def rows_of(runner: ModelRunner, drafters: Mapping[str, Drafter]) -> BlockRows:
    return BlockRows(runner.store, parts_of(drafters, HIDDEN_SIZE, torch.float32))


def in_file(path: Path, num_slots: int = 200) -> Make:
    def make(runner: ModelRunner, drafters: Mapping[str, Drafter]) -> BlockTier:
        rows = rows_of(runner, drafters)
        return BlockTier(rows, SlotFile(path, num_slots, rows.num_bytes, {"weights": "tiny"}))

    return make


def in_memory(num_slots: int) -> Make:
    def make(runner: ModelRunner, drafters: Mapping[str, Drafter]) -> BlockTier:
        rows = rows_of(runner, drafters)
        return BlockTier(rows, MemorySlots(num_slots, rows.num_bytes))

    return make


def ask(
    name: str,
    prompt: list[int],
    wanted: SpeculativeParams = PLAIN,
    max_tokens: int = 12,
    cache_salt: str = "",
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    return request(name, prompt, sampling, wanted, cache_salt=cache_salt)


def tidied(core: EngineCore) -> None:
    """As the engine does while nothing is asked."""
    while save_some(core.pool) is not None:
        core.pool.check_integrity()


def ended(core: EngineCore) -> None:
    save_all(core.pool)
    core.close()


def damaged(path: Path, slot: int, slot_bytes: int) -> None:
    size = -(-slot_bytes // 4096) * 4096
    with path.open("r+b") as file:
        file.seek(4096 + -(-200 * 64 // 4096) * 4096 + slot * size)
        file.write(b"spoiled")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_restarted_engine_finds_its_prefixes_and_writes_the_same(
    target: EveryDrafterTarget, tmp_path: Path, name: str
) -> None:
    wanted, path = STRATEGIES[name], tmp_path / "kv"
    kept = target.setup.but(tier=in_file(path))
    core = target.core(kept)
    first = Driver(core).run(ask("a", LONG, wanted))
    warm = Driver(core).run(ask("b", LONG, wanted))
    ended(core)
    core = target.core(kept)
    again = Driver(core).run(ask("c", LONG, wanted), ask("d", LONG[:40], wanted))
    for each, driver in (("b", warm), ("c", again)):
        assert driver.token_ids[each] == first.token_ids["a"]
        assert driver.finishes[each].num_cached_tokens > 80
    assert again.finishes["c"].num_cached_tokens == warm.finishes["b"].num_cached_tokens
    # Rows of drafts came back, too: what is drafted from is what was there before.
    if name != "auto":  # which has learned from finished texts
        drafted = [each.num_draft_tokens for each in (again, warm)]
        assert drafted[0]["c"] == drafted[1]["b"]
        accounts = [again.finishes["c"].speculative, warm.finishes["b"].speculative]
        assert accounts[0].num_accepted_tokens == accounts[1].num_accepted_tokens
    assert core.pool.tier is not None
    assert core.pool.tier.num_restored >= 20
    assert sum(each.offload_restored_tokens for each in again.stats) > 80
    assert not traces_of(core, ["c", "d"])
    core.close()


def test_restored_rows_have_the_bits_that_were_computed(
    target: EveryDrafterTarget, tmp_path: Path
) -> None:
    """Log-probabilities are those of an engine that computes everything, to the last bit."""
    plain = Driver(target.core(target.setup)).run(ask("a", LONG))
    warm = target.core(target.setup)
    Driver(warm).run(ask("x", LONG))
    from_memory = Driver(warm).run(ask("b", LONG))
    core = restarted(target, tmp_path, ask("x", LONG))
    from_file = Driver(core).run(ask("c", LONG))
    core.close()
    assert from_file.token_ids["c"] == plain.token_ids["a"]
    assert from_file.logprobs["c"] == from_memory.logprobs["b"]


@pytest.mark.parametrize("name", ["none", "small_model", "eagle3"])
@pytest.mark.parametrize("kind", ["file", "memory", "full", "tiny"])
def test_preempted_requests_come_back_and_write_the_same(
    target: EveryDrafterTarget, tmp_path: Path, name: str, kind: str
) -> None:
    """Blocks for half of what is asked: requests lose them again and again, and find them kept."""
    makes = {
        "file": in_file(tmp_path / "kv"),
        "memory": in_memory(200),
        "full": in_memory(30),
        "tiny": in_memory(2),
    }
    asked = [
        ask(f"r{index}", LONG[24 * index :] + LONG[: 24 * index], STRATEGIES[name], 20 + index)
        for index in range(4)
    ]
    calm = Driver(target.core(target.setup)).run(*asked)
    core = target.core(target.setup.but(num_blocks=52, tier=makes[kind]))
    assert core.pool.tier is not None
    core.pool.tier.blocks_per_step = 5
    for _ in range(2):
        tight = Driver(core).run(*asked)
        assert tight.token_ids == calm.token_ids
        tidied(core)
    assert sum(each.num_preemptions for each in tight.finishes.values()) > 0
    assert core.pool.tier.num_restored > 0 or kind == "tiny"
    assert core.pool.tier.num_damaged == 0
    core.close()


def restarted(target: EveryDrafterTarget, path: Path, asked: GenerationRequest) -> EngineCore:
    """An engine whose file is that of one that served this request and ended."""
    kept = target.setup.but(tier=in_file(path / "kv"))
    core = target.core(kept)
    Driver(core).run(asked)
    ended(core)
    return target.core(kept)


def test_a_text_comes_back_in_parts_and_nobody_waits_for_all_of_it(
    target: EveryDrafterTarget, tmp_path: Path
) -> None:
    core = restarted(target, tmp_path, ask("x", LONG))
    tier = core.pool.tier
    assert tier is not None
    tier.blocks_per_step = 4
    driver = Driver(core)
    driver.submit(ask("neighbour", LONG[5:12], max_tokens=40))
    driver.step()
    driver.submit(ask("hit", LONG))
    for _ in range(5):  # 23 blocks, 4 at a time
        before, said = tier.num_restored, len(driver.token_ids["neighbour"])
        driver.step()
        assert tier.num_restored - before == 4
        assert len(driver.token_ids["neighbour"]) == said + 1
        assert not driver.token_ids["hit"]
    driver.run()
    assert driver.finishes["hit"].num_cached_tokens == 92
    core.close()


def test_a_request_that_leaves_while_it_waits_for_its_blocks_leaves_nothing(
    target: EveryDrafterTarget, tmp_path: Path
) -> None:
    core = restarted(target, tmp_path, ask("x", LONG))
    assert core.pool.tier is not None
    core.pool.tier.blocks_per_step = 4
    driver = Driver(core)
    driver.submit(ask("gone", LONG))
    driver.step()
    core.abort("gone")
    driver.run(ask("next", LONG))
    assert driver.finishes["gone"].reason == "abort"
    assert driver.finishes["next"].num_cached_tokens == 92
    assert not traces_of(core, ["gone", "next"])
    core.close()


def test_salts_keep_tenants_apart(target: EveryDrafterTarget, tmp_path: Path) -> None:
    core = restarted(target, tmp_path, ask("x", LONG, cache_salt="one"))
    driver = Driver(core).run(
        ask("theirs", LONG, cache_salt="two"), ask("own", LONG, cache_salt="one")
    )
    assert driver.finishes["theirs"].num_cached_tokens == 0
    assert driver.finishes["own"].num_cached_tokens == 92
    core.close()


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_damaged_block_is_computed_again_and_counted(
    target: EveryDrafterTarget, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    kept = target.setup.but(tier=in_file(path))
    core = target.core(kept)
    first = Driver(core).run(ask("a", LONG, STRATEGIES[name]))
    ended(core)
    assert core.pool.tier is not None
    damaged(path, 5, core.pool.tier._content.num_bytes)
    core = target.core(kept)
    again = Driver(core).run(ask("b", LONG, STRATEGIES[name]))
    assert again.token_ids["b"] == first.token_ids["a"]
    assert again.finishes["b"].num_cached_tokens < 92
    assert sum(each.offload_damaged for each in again.stats) == 1
    assert "damaged and forgotten" in caplog.text
    ended(core)
    core = target.core(kept)
    healed = Driver(core).run(ask("c", LONG, STRATEGIES[name]))
    assert healed.finishes["c"].num_cached_tokens >= 88
    assert healed.token_ids["c"] == first.token_ids["a"]
    core.close()


def test_rows_that_a_drafter_adds_later_are_kept_too(
    target: EveryDrafterTarget, tmp_path: Path
) -> None:
    """A prefix computed for a request that did not draft, then for one whose head needs rows of it."""
    kept = target.setup.but(tier=in_file(tmp_path / "kv"))
    core = target.core(kept)
    first = Driver(core).run(ask("a", LONG))
    tidied(core)
    Driver(core).run(ask("b", LONG, STRATEGIES["eagle3"]))
    ended(core)
    core = target.core(kept)
    again = Driver(core).run(ask("c", LONG, STRATEGIES["eagle3"]))
    assert again.finishes["c"].num_cached_tokens >= 88
    assert again.num_draft_tokens["c"] > 0
    assert again.token_ids["c"] == first.token_ids["a"]
    core.close()


def test_a_failed_step_forgets_what_is_in_memory_and_keeps_what_was_copied(
    target: EveryDrafterTarget, tmp_path: Path
) -> None:
    core = target.core(target.setup.but(tier=in_file(tmp_path / "kv")))
    first = Driver(core).run(ask("a", LONG))
    tidied(core)
    forward = core.runner.forward

    def broken(batch: object) -> object:
        raise RuntimeError(f"a fault with {batch}")

    core.runner.forward = broken  # type: ignore[method-assign]
    core.submit(core.prepare(ask("b", LONG[:10])))
    core.step()
    core.runner.forward = forward  # type: ignore[method-assign]
    assert core.pool.counts()["cached"] == 0
    again = Driver(core).run(ask("c", LONG))
    assert again.token_ids["c"] == first.token_ids["a"]
    assert again.finishes["c"].num_cached_tokens == 92
    core.close()


def test_without_a_tier_nothing_is_done(target: EveryDrafterTarget) -> None:
    core = target.core(Setup(max_num_batched_tokens=256))
    Driver(core).run(ask("a", LONG))
    assert save_some(core.pool) is None
    assert not core.pool._unsaved
    assert core.gauges().offload_blocks == 0
    core.close()
