"""``auto`` with a head, in the engine: it writes what the target writes, and the head's rows are right.

``FakeFeatureModel`` fails where a row reads another state than the text's, or attends to other rows. A
head that fails beside ``auto`` is left out and shows in the log alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafters.auto import AutoDrafter
from drafters.base import NORMED, Drafter
from drafters.registry import build_drafters
from engine.request.params import PLAIN, GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import Driver, Setup, drafting, request, traces_of
from worlds.feature_world import TARGET, FakeFeatureModel, FakeHead
from worlds.lanes import examples

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
AUTO = drafting("auto", num_tokens=3)
WANTED = {
    "chain": AUTO,
    "tree": drafting("auto", num_tokens=6, width=2),
    "goodput": drafting("auto", "goodput", num_tokens=4),
    "head": drafting("head", num_tokens=3),
    "free": drafting("ngram"),
    "resting": drafting("auto", num_tokens=0),
    "plain": PLAIN,
}


class World(Driver):
    """An engine whose ``auto`` has a head, which requests may name, too."""

    def __init__(self, setup: Setup = Setup()) -> None:  # noqa: B008  (frozen)
        self.model = FakeFeatureModel(setup.block_size)
        self.head = FakeHead(self.model)
        built = build_drafters(["ngram", "auto"])
        drafters: dict[str, Drafter] = {"head": self.head, **built}
        drafters["auto"].meet(drafters)
        super().__init__(TARGET.core(replace(setup, drafters=drafters)))

    def num_fed(self, name: str) -> int:
        """Rows of known tokens that the head ran for a request."""
        rows = [each for call in self.model.calls for each in call if each.ask.request_id == name]
        return sum(len(each.token_ids) for each in rows if each.base < len(each.ask.token_ids))

    def check(self, *requests: GenerationRequest) -> None:
        """The target's own texts, and nothing is left of them."""
        for each in requests:
            wanted, _ = TARGET.stream(each, (), 256)
            assert self.token_ids[each.request_id] == wanted
        assert self.core.speculation.num_failures == 0
        assert self.model.states == {}
        assert traces_of(self.core, [each.request_id for each in requests]) == []


@pytest.fixture(autouse=True)
def _no_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [each.message for each in caplog.records if each.name == "drafters.containment"] == []


def ask(
    name: str,
    wanted: SpeculativeParams,
    prompt: list[int] = PROMPT,
    temperature: float = 0.0,
    max_tokens: int = 24,
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
    return request(name, prompt, sampling, wanted)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_text_is_the_targets_own(temperature: float) -> None:
    """All kinds of requests beside each other, their prompts in chunks."""
    world = World(Setup(prefill_chunk=5))
    assert isinstance(world.core.speculation.drafters["auto"], AutoDrafter)
    assert world.core.speculation.hidden_layers == (NORMED,)
    requests = [ask(f"as {kind}", each, PROMPT, temperature) for kind, each in WANTED.items()]
    world.run(*requests)
    world.check(*requests)
    assert world.num_fed("as chain") > 0
    assert sum(world.drafted["as chain"]) > sum(world.drafted["as free"])


def test_a_prefix_hit_is_cut_to_the_heads_rows_and_drafts_as_well() -> None:
    world = World()
    cached = {}
    for name in ("plain", "one", "another", "named"):
        each = ask(name, {"plain": PLAIN, "named": WANTED["head"]}.get(name, AUTO))
        cached[name] = world.run(each).finishes[name].num_cached_tokens
        world.check(each)
    assert cached == {"plain": 0, "one": 0, "another": 20, "named": 20}
    assert 0 < world.num_fed("another") < 20 + 24


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(WANTED)),
            st.integers(1, 21),
            st.integers(0, 12),
            st.sampled_from([0.0, 0.8]),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 20),
    st.integers(1, 4),
    st.sampled_from([2, 64]),
)
def test_rows_are_right_in_any_schedule(
    caplog: pytest.LogCaptureFixture,
    arrivals: list[tuple[str, int, int, float]],
    num_spare: int,
    max_num_seqs: int,
    chunk: int,
) -> None:
    caplog.clear()
    world = World(Setup(num_blocks=12 + num_spare, max_num_seqs=max_num_seqs, prefill_chunk=chunk))
    requests = [
        (at, ask(f"request-{number}", WANTED[kind], PROMPT[:size], temperature, 12))
        for number, (kind, size, at, temperature) in enumerate(arrivals)
    ]
    for step in range(13):
        world.submit(*(each for at, each in requests if at == step))
        world.step()
    world.run()
    world.check(*(each for _, each in requests))
    assert not [each for each in caplog.records if each.name == "drafters.containment"]
