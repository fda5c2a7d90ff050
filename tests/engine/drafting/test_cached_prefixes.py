"""A prefix hit drafts as well as a miss: a head's rows are cached, evicted, preempted, chunked and salted
with the blocks, whoever filled them, and whether it drafts by its name or beside ``auto``.

``FakeFeatureModel`` fails where a row reads another state than the text's, or attends to other rows; the
driver checks the pool after every step. A head that fails beside ``auto`` is left out and shows in the
log alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafters.base import NORMED, Drafter, HiddenRows
from drafters.registry import build_drafters
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import Driver, Setup, drafting, request, traces_of
from worlds.fake_drafters import FakeDrafter
from worlds.feature_world import TARGET, FakeFeatureModel, FakeHead
from worlds.lanes import examples

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
HEAD = drafting("head", num_tokens=3, min_confidence=0.0)
AUTO = drafting("auto", num_tokens=3)
WANTED = {
    "head": HEAD,
    "resting": drafting("head", num_tokens=0),
    "auto": AUTO,
    "auto, trees": drafting("auto", num_tokens=6, width=2),
    "auto, goodput": drafting("auto", "goodput", num_tokens=4),
    "auto, resting": drafting("auto", num_tokens=0),
    "free": drafting("ngram"),
    "plain": PLAIN,
}
KINDS = pytest.mark.parametrize(
    ("first_row", "keeps_anchor"), [(0, True), (1, True), (0, False)], ids=["0", "1", "context"]
)


def ask(
    name: str,
    prompt: list[int],
    wanted: SpeculativeParams = HEAD,
    max_tokens: int = 6,
    temperature: float = 0.0,
    **changes: Any,
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
    return request(name, prompt, sampling, wanted, **changes)


class World(Driver):
    """An engine with a head, which ``auto`` has as well, and how many tokens each request took from the
    cache when it started."""

    def __init__(self, setup: Setup = Setup(), **sizes: Any) -> None:  # noqa: B008  (frozen)
        self.model = FakeFeatureModel(setup.block_size, **sizes)
        self.head = FakeHead(self.model)
        drafters: dict[str, Drafter] = {"head": self.head, **build_drafters(["ngram", "auto"])}
        drafters["auto"].meet(drafters)
        super().__init__(TARGET.core(replace(setup, drafters=drafters)))
        self.hits: dict[str, list[int]] = {}
        opened = self.core.pool.open

        def note(request_id: str, *args: Any) -> int:
            num_cached = opened(request_id, *args)
            self.hits.setdefault(request_id, []).append(num_cached)
            return num_cached

        self.core.pool.open = note  # type: ignore[method-assign, assignment]

    def hit(self, each: GenerationRequest) -> int:
        self.run(each)
        assert self.core.speculation.num_failures == 0
        return self.hits[each.request_id][0]

    def num_fed(self, each: GenerationRequest) -> int:
        """Rows of known tokens that the head ran for the request."""
        return sum(
            len(rows.token_ids)
            for call in self.model.calls
            for rows in call
            if rows.ask.request_id == each.request_id and rows.base < len(rows.ask.token_ids)
        )

    def check_texts(self, *requests: GenerationRequest, longest: int = 64) -> None:
        """The target's own as far as they go, whole but for what was aborted; nothing is left of them."""
        for each in requests:
            wanted, _ = TARGET.stream(each, (), longest)
            found = self.token_ids[each.request_id]
            assert found == wanted[: len(found)]
            is_cut = self.finishes[each.request_id].reason == "abort"
            assert is_cut or len(found) == len(wanted)
        assert self.core.speculation.num_failures == 0
        assert self.model.states == {}
        assert traces_of(self.core, [each.request_id for each in requests]) == []

    def text(self, each: GenerationRequest) -> list[int]:
        return [*each.prompt_token_ids, *self.token_ids[each.request_id]]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_takes_a_seat_finds_the_rows_of_who_has_left_it(runs_ahead: bool) -> None:
    """They are run when it leaves: before the next one is admitted, in whichever step that is."""
    world = World(Setup(max_num_seqs=1, runs_ahead=runs_ahead))
    world.run(ask("leaves", PROMPT, drafting("head", num_tokens=0)), ask("takes", PROMPT))
    assert world.hits["takes"] == [20]


@KINDS
def test_a_hit_without_rows_is_computed_again_and_the_next_one_is_whole(
    first_row: int, keeps_anchor: bool
) -> None:
    world = World(first_row=first_row, keeps_anchor=keeps_anchor)
    assert world.hit(ask("plain", PROMPT, PLAIN)) == 0
    assert world.hit(ask("again", PROMPT, PLAIN)) == 20
    assert world.hit(ask("first", PROMPT)) == 0
    assert world.hit(ask("second", PROMPT)) == 20
    assert world.hit(ask("other", PROMPT, drafting("ngram"))) == 20
    assert world.num_draft_tokens["second"] == world.num_draft_tokens["first"] > 0
    assert world.num_fed(ask("second", PROMPT)) < 20 < world.num_fed(ask("first", PROMPT))
    assert len(set(map(tuple, world.token_ids.values()))) == 1


@KINDS
def test_a_hit_is_cut_where_rows_end(first_row: int, keeps_anchor: bool) -> None:
    """A turn with the head, one without it, one with it again: the middle one is computed again."""
    world = World(first_row=first_row, keeps_anchor=keeps_anchor)
    first = ask("first", PROMPT)
    world.run(first)
    turn = ask("turn", [*world.text(first), *PROMPT], PLAIN)
    assert world.hit(turn) == 24
    last = [*world.text(turn), 1, 2]
    assert world.hit(ask("last", last)) == 24
    assert world.hit(ask("follow-up", last)) == (len(last) - 1) // 4 * 4


@pytest.mark.parametrize("wanted", [HEAD, drafting("head", num_tokens=0, min_confidence=0.0)])
def test_a_follow_up_finds_all_rows_even_if_nothing_was_drafted(wanted: SpeculativeParams) -> None:
    world = World()
    for max_tokens in range(1, 14):
        each = ask(f"r{max_tokens}", [max_tokens, *PROMPT], wanted, max_tokens)
        world.run(each)
        text = world.text(each)
        assert world.hit(ask(f"next {max_tokens}", [*text, 1])) == (len(text) - 1) // 4 * 4


def test_tenants_do_not_find_each_others_rows() -> None:
    world = World()
    assert world.hit(ask("a", PROMPT, cache_salt="a")) == 0
    assert world.hit(ask("plain", PROMPT, PLAIN, cache_salt="b")) == 0
    assert world.hit(ask("b", PROMPT, cache_salt="b")) == 0, "its own blocks have no rows"
    assert world.hit(ask("a again", PROMPT, cache_salt="a")) == 20
    assert world.hit(ask("b again", PROMPT, cache_salt="b")) == 20
    assert world.hit(ask("odd", PROMPT, cache_salt="\ud800")) == 0


def test_what_was_evicted_is_a_miss_and_is_cached_again() -> None:
    world = World(Setup(num_blocks=8))
    assert world.hit(ask("a", PROMPT)) == 0
    assert world.hit(ask("plain", PROMPT[::-1], PLAIN)) == 0
    assert world.hit(ask("b", PROMPT)) < 20
    assert world.hit(ask("c", PROMPT)) == 20


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
@pytest.mark.parametrize("max_catch_up_rows", [1, 5, 64])
def test_chunks_of_prompts_and_of_rows_change_nothing(chunk: int, max_catch_up_rows: int) -> None:
    world = World(Setup(prefill_chunk=chunk), max_catch_up_rows=max_catch_up_rows)
    world.run(ask("plain", PROMPT[:9], PLAIN))
    assert world.hit(ask("first", PROMPT)) == 0
    assert world.hit(ask("second", PROMPT)) == 20


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_an_aborted_request_leaves_its_rows(num_steps: int) -> None:
    world = World(Setup(prefill_chunk=6))
    world.submit(ask("a", PROMPT, max_tokens=40))
    for _ in range(num_steps):
        world.step()
    (running,) = world.core.scheduler.running
    num_computed = running.num_computed_tokens
    world.core.abort("a")
    assert world.hit(ask("b", PROMPT)) == min(20, num_computed // 4 * 4)
    assert traces_of(world.core, ["a", "b"]) == []
    assert world.model.states == {}


def test_a_preempted_request_finds_its_rows_again() -> None:
    world = World(Setup(num_blocks=16, max_num_seqs=2))
    requests = [ask("a", PROMPT, max_tokens=24), ask("b", PROMPT[::-1], max_tokens=24)]
    world.run(*requests)
    assert world.finishes["b"].num_preemptions > 0
    assert any(world.hits["b"][1:]), "what was not evicted is of use"
    world.check_texts(*requests)


def test_those_that_end_in_one_step_are_caught_up_in_one_forward() -> None:
    resting = drafting("head", num_tokens=0)
    world = World(max_catch_up_rows=500)
    prompts = [[number, *PROMPT] for number in range(5)]
    world.run(*(ask(f"r{number}", prompt, resting) for number, prompt in enumerate(prompts)))
    (call,) = world.model.calls
    assert sorted(rows.ask.request_id for rows in call) == [f"r{number}" for number in range(5)]
    assert all(rows.num_scored == 0 for rows in call)
    for number, prompt in enumerate(prompts):
        assert world.hit(ask(f"again {number}", prompt)) == 20


def test_a_follow_up_in_the_next_step_finds_what_was_left() -> None:
    """While others run on."""
    world = World()
    resting = drafting("head", num_tokens=0)
    world.submit(ask("beside", PROMPT[::-1], max_tokens=40), ask("first", PROMPT, resting))
    while "first" not in world.finishes:
        world.step()
    text = world.text(ask("first", PROMPT))
    world.submit(ask("next", [*text, 1]))
    world.step()
    assert world.core.has_work
    assert world.hits["next"] == [(len(text) - 1) // 4 * 4]


def test_rows_whose_state_behind_them_is_anothers_are_not_built_on() -> None:
    """The blocks went to another text whose rows were not run yet."""
    head, table = FakeHead(FakeFeatureModel()), [4, 2, 7]

    def see(name: str, text: list[int]) -> None:
        head.open(name, text, {}, "")
        states = torch.tensor(TARGET.values(text))[:, None]
        head.observe_hidden([HiddenRows(name, 0, text, (states,), table)])

    see("a", PROMPT[:12])
    head.leave_blocks("a", PROMPT[:12], table)
    head.settle()
    assert head.num_usable_tokens(PROMPT, table, "") == 12
    see("b", [*PROMPT[:4], 0, 0, 0, 0])
    assert head.num_usable_tokens(PROMPT, table, "") == 12, "the first and last are the text's"
    assert head.num_usable_tokens(PROMPT, table[:2], "") == 4


def test_states_of_resting_requests_do_not_pile_up() -> None:
    """They are run 512 at a time, for all that have so many at once, in forwards that have room."""
    sizes = Setup(num_blocks=800, max_model_len=1400, prefill_chunk=300, max_num_batched_tokens=700)
    world = World(sizes, max_catch_up_rows=400, max_len=1000)
    resting = drafting("head", num_tokens=0)
    prompts = [[(number * at) % 11 for at in range(1200)] for number in (3, 5)]
    world.submit(*(ask(f"r{number}", prompt, resting) for number, prompt in enumerate(prompts)))
    most = 0
    while world.core.has_work:
        world.step()
        most = max([most, *map(len, world.model.states.values())])
    assert most < 512 + 300
    fed = [[len(rows.token_ids) for rows in call] for call in world.model.calls]
    assert len(fed) > 2
    assert any(len(call) == 2 for call in fed)
    assert max(map(sum, fed)) == 400
    assert max(rows.base + len(rows.token_ids) for c in world.model.calls for rows in c) <= 1000
    assert world.hit(ask("again", prompts[0][:900])) == 896
    assert world.hit(ask("too long to draft for", prompts[0])) == 1196


def test_two_heads_have_rows_of_their_own() -> None:
    heads = [FakeHead(FakeFeatureModel(), name) for name in ("head", "other")]
    drafters = {each.info.name: each for each in heads}
    driver = Driver(TARGET.core(Setup(drafters=drafters)))
    cached = []
    for number, name in enumerate(["head", "other", "other", "head"]):
        each = ask(f"r{number}", PROMPT, drafting(name, num_tokens=3))
        cached.append(driver.run(each).finishes[each.request_id].num_cached_tokens)
    # The second's blocks took over the names; the first's are gone with them.
    assert cached == [0, 0, 20, 0]
    assert driver.core.speculation.num_failures == 0


# --- beside auto ---


@pytest.fixture
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [each for each in caplog.records if each.name == "drafters.containment"]


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_text_is_the_targets_own(temperature: float) -> None:
    """All kinds of requests beside each other, their prompts in chunks."""
    world = World(Setup(prefill_chunk=5))
    assert world.core.speculation.hidden_layers == (NORMED,)
    requests = [ask(f"as {kind}", PROMPT, each, 24, temperature) for kind, each in WANTED.items()]
    world.run(*requests)
    world.check_texts(*requests)
    assert world.num_fed(ask("as auto", PROMPT)) > 0
    assert sum(world.drafted["as auto"]) > sum(world.drafted["as free"])


@pytest.mark.usefixtures("quiet_log")
def test_a_prefix_hit_is_cut_to_the_heads_rows_beside_auto_too() -> None:
    world = World()
    kinds = {"plain": PLAIN, "one": AUTO, "another": AUTO, "named": HEAD}
    cached = {name: world.hit(ask(name, PROMPT, each, 24)) for name, each in kinds.items()}
    assert cached == {"plain": 0, "one": 0, "another": 20, "named": 20}
    assert 0 < world.num_fed(ask("another", PROMPT)) < 20 + 24


# --- drafters that fail ---


class Faulty(FakeDrafter):
    """``answer``: how many tokens of a cached prefix it says to be of use, or what it raises."""

    def __init__(self, answer: Any = 0, fails: str = "") -> None:
        super().__init__(fails=fails)
        self.answer = answer

    def num_usable_tokens(self, *_: object) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def leave_blocks(self, request_id: str, *_: object) -> None:
        self._maybe_fail("leave_blocks", request_id)

    def settle(self) -> None:
        self._maybe_fail("settle", "")


@pytest.mark.parametrize("answer", [-1, 99, True, 4.0, None, RuntimeError("told to"), SystemExit()])
def test_a_drafter_that_does_not_know_costs_no_hit(answer: Any) -> None:
    driver = Driver(TARGET.core(Setup(drafters={"fake": Faulty(answer)})))
    driver.run(ask("plain", PROMPT, PLAIN), ask("warm-up", PROMPT[:4], drafting("fake")))
    assert driver.core.speculation.num_failures == 0
    driver.run(ask("r", PROMPT, drafting("fake")))
    assert driver.finishes["r"].num_cached_tokens == 20
    assert driver.finishes["r"].speculative.num_failed_drafts == 0, "it was not open yet"
    assert driver.core.speculation.num_failures == 1
    assert sum(stats.num_draft_failures for stats in driver.stats) == 1


@pytest.mark.parametrize(("most", "num_cached"), [(16, 4), (15, 20)])
def test_no_more_of_a_prefix_is_computed_again_than_a_drafter_is_worth(
    most: int, num_cached: int
) -> None:
    drafter = Faulty(answer=4)
    drafter.most_recomputed = most
    driver = Driver(TARGET.core(Setup(drafters={"fake": drafter})))
    driver.run(ask("plain", PROMPT, PLAIN))
    driver.run(ask("r", PROMPT, drafting("fake")))
    assert driver.finishes["r"].num_cached_tokens == num_cached


@pytest.mark.parametrize("fails", ["leave_blocks", "settle"])
def test_a_drafter_that_fails_at_the_end_costs_nobody_anything(fails: str) -> None:
    driver = Driver(TARGET.core(Setup(drafters={"fake": Faulty(fails=fails)})))
    for number in range(12):
        driver.run(ask(f"r{number}", PROMPT, drafting("fake")))
    assert driver.core.speculation.num_failures == 12
    assert len({tuple(each) for each in driver.token_ids.values()}) == 1


def test_a_head_that_fails_at_the_end_forgets_all_the_same() -> None:
    world = World()
    world.submit(ask("a", PROMPT))
    world.step()
    world.model.fails = True
    world.core.abort("a")
    world.model.fails = False
    assert world.model.states == {}
    world.step()
    assert traces_of(world.core, ["a"]) == []
    assert world.core.speculation.num_failures == 1
    world.run(ask("b", PROMPT))
    assert world.hits["b"] == [0]


def test_a_drafter_without_rows_of_its_own_uses_all() -> None:
    assert build_drafters(["ngram"])["ngram"].num_usable_tokens(PROMPT, [0], "") == len(PROMPT)
    head = FakeHead(FakeFeatureModel())
    assert head.num_usable_tokens(PROMPT, [0, 1], "") == 0


# --- any schedule ---


@st.composite
def lives(draw: st.DrawFn) -> tuple[GenerationRequest, int, int]:
    """A request, the step in which it comes, and how many steps later it is aborted; texts share
    beginnings."""
    prompt = [*PROMPT[: draw(st.integers(1, 20))], *draw(st.sampled_from([[], [7], [7, 7]]))]
    wanted = WANTED[draw(st.sampled_from(["head", "head", "head", *WANTED]))]
    if wanted is HEAD:
        wanted = replace(HEAD, tree_width=draw(st.integers(1, 2)))
    each = ask(
        "",
        prompt,
        wanted,
        draw(st.integers(1, 16)),
        draw(st.sampled_from([0.0, 0.0, 0.8])),
        priority=draw(st.sampled_from([0, 0, -1])),
        cache_salt=draw(st.sampled_from(["", "", "b"])),
    )
    return each, draw(st.integers(0, 20)), draw(st.sampled_from([1000, 1000, 2, 5]))


@settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(lives(), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 30),
    st.integers(1, 4),
    st.sampled_from([2, 5, 64]),
    st.sampled_from([(0, True), (1, True), (0, False)]),
    st.sampled_from([3, 64]),
)
def test_rows_are_right_in_any_schedule(
    caplog: pytest.LogCaptureFixture,
    arrivals: list[tuple[GenerationRequest, int, int]],
    block_size: int,
    num_spare: int,
    max_num_seqs: int,
    chunk: int,
    kind: tuple[int, bool],
    max_catch_up_rows: int,
) -> None:
    caplog.clear()
    setup = Setup(
        num_blocks=40 // block_size + num_spare,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        prefill_chunk=chunk,
        max_model_len=40,
    )
    world = World(
        setup, first_row=kind[0], keeps_anchor=kind[1], max_catch_up_rows=max_catch_up_rows
    )
    asked: dict[str, GenerationRequest] = {}
    for step in range(1000):
        for number, (each, at, lifetime) in enumerate(arrivals):
            name = f"request-{number}"
            if step == at:
                asked[name] = replace(each, request_id=name)
                world.submit(asked[name])
            if step == at + lifetime and name not in world.finishes:
                world.core.abort(name)
        world.step()
        if len(asked) == len(arrivals) and not world.core.has_work:
            break
    world.check_texts(*asked.values(), longest=40)
    assert not [each for each in caplog.records if each.name == "drafters.containment"]
