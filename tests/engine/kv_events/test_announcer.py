"""Events tell of the prefix cache's blocks, each once, and of no salted text."""

from __future__ import annotations

from collections.abc import Callable

from engine.kv_events.announcer import Announcer
from engine.kv_events.begin import KvEvents
from engine.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, block_hash
from engine.request.params import SamplingParams
from kvpool.prefix_cache import block_digest, root_digest
from worlds.checked_pool import SIZE, TOKENS, CheckedPool, run
from worlds.engine_harness import Driver, Setup, TinyTarget, circle_prompt, request
from worlds.kv_index import Wire, cached_hashes


def announced(
    num_blocks: int = 8, salted: bool = False
) -> tuple[CheckedPool, list[list[Event]], Callable[[], None]]:
    """A pool, the batches that are told of it, and what ends a step."""
    batches: list[list[Event]] = []
    announcer = Announcer(SIZE, salted, batches.append)
    announcer.flush()
    batches.clear()
    return CheckedPool(num_blocks, SIZE, listener=announcer), batches, announcer.flush


def hashes(token_ids: list[int], cache_salt: str = "") -> list[int]:
    digest, found = root_digest(cache_salt), []
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        digest = block_digest(digest, token_ids[start : start + SIZE])
        found.append(block_hash(digest))
    return found


def test_a_text_is_one_event_and_goes_on_from_its_last_block() -> None:
    pool, batches, flush = announced()
    run(pool, "a", TOKENS[:9])
    flush()
    pool.allocate("a", 13)
    pool.promote("a", TOKENS[:13], 13)
    flush()
    first, second, third = hashes(TOKENS[:12])
    assert batches == [
        [BlockStored([first, second], None, TOKENS[:8], SIZE, medium="GPU")],
        [BlockStored([third], second, TOKENS[8:12], SIZE, medium="GPU")],
    ]


def test_what_is_cached_already_is_not_told_again() -> None:
    pool, batches, flush = announced()
    for name in "ab":
        run(pool, name, TOKENS[:9])
    pool.free("a")
    run(pool, "c", TOKENS[:9], cap=8)
    flush()
    assert [type(each) for batch in batches for each in batch] == [BlockStored]


def test_evicted_blocks_are_taken_back_and_nothing_is_said_of_nothing() -> None:
    pool, batches, flush = announced(num_blocks=2)
    run(pool, "a", TOKENS[:8])
    pool.free("a")
    flush()
    flush()
    assert len(batches) == 1
    pool.open("b", [7], "", 0)
    pool.allocate("b", 8)
    flush()
    # The last block of a text goes first.
    assert batches[1:] == [[BlockRemoved(hashes(TOKENS[:8])[::-1], "GPU")]]


def test_a_cache_that_is_emptied_says_so_once() -> None:
    pool, batches, flush = announced()
    run(pool, "a", TOKENS[:8])
    flush()
    pool.forget_blocks()
    pool.forget_blocks()
    flush()
    assert batches[1:] == [[AllBlocksCleared()]]


def test_an_engine_that_begins_takes_back_what_one_before_it_held() -> None:
    """A relaunched one comes under the same topic."""
    batches: list[list[Event]] = []
    announcer = Announcer(SIZE, salted=False, send=batches.append)
    run(CheckedPool(8, SIZE, listener=announcer), "a", TOKENS[:8])
    announcer.flush()
    (events,) = batches
    assert [type(each) for each in events] == [AllBlocksCleared, BlockStored]


def test_nothing_is_said_of_salted_texts() -> None:
    pool, batches, flush = announced(num_blocks=2)
    run(pool, "a", TOKENS[:8], cache_salt="tenant")
    pool.free("a")
    pool.open("b", [7], "tenant", 0)
    pool.allocate("b", 8)
    pool.free("b")
    run(pool, "c", TOKENS[:8], cache_salt="tenant")
    pool.forget_blocks()
    flush()
    assert batches == []


def test_where_salts_are_asked_for_the_first_block_says_its_own() -> None:
    pool, batches, flush = announced(salted=True)
    run(pool, "a", TOKENS[:8], cache_salt="tenant")
    run(pool, "b", TOKENS[:8])
    flush()
    salted, plain = batches[0]
    assert isinstance(salted, BlockStored)
    assert isinstance(plain, BlockStored)
    assert salted.extra_keys == [["tenant"], None]
    assert plain.extra_keys is None
    assert set(salted.block_hashes).isdisjoint(plain.block_hashes)


def test_an_engine_tells_what_its_cache_holds_after_every_step(tiny_target: TinyTarget) -> None:
    """Preemptions, evictions, equal prompts and a salted tenant, in a pool that is too small for them."""
    everything, plain = Wire(), Wire()
    for wire, salted in ((everything, True), (plain, False)):
        announcer = Announcer(4, salted, wire.send)
        core = tiny_target.core(Setup(num_blocks=20, kv_events=KvEvents(announcer, wire)))
        driver = Driver(core)
        for number in range(9):
            salt = "tenant" if number % 3 == 2 else ""
            prompt = circle_prompt(number // 3)
            sampling = SamplingParams(temperature=0.0, max_tokens=10)
            driver.submit(request(f"r{number}", prompt, sampling, cache_salt=salt))
        while core.has_work:
            driver.step()
            if salted:
                assert wire.index.tokens.keys() == cached_hashes(core.pool)
        assert sum(each.num_preemptions for each in driver.stats) > 0
        assert sum(each.num_kv_events for each in driver.stats) == wire.num_sent > 0
    assert any(b"BlockRemoved" in payload for payload in plain.payloads)
    assert set(everything.index.salts.values()) == {"tenant"}
    assert plain.index.salts == {}
    assert not any(b"tenant" in payload for payload in plain.payloads)
    assert plain.num_sent < everything.num_sent
    # Their texts begin as others' do, but their blocks are others.
    assert not plain.index.parents.keys() & everything.index.salts.keys()
