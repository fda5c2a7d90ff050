"""Grammars' share of a step is measured and bounded, requests share it, and no text shows any of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.grammar.constraint import GrammarConstraint
from engine.grammar.mask_time import MaskTime
from engine.request.params import GenerationRequest, SamplingParams
from worlds.engine_harness import Driver, Setup, TinyTarget, drafting, request
from worlds.grammar_world import EOS, tiny_compiler, tiny_tokenizer

COSTLY = LLMatcher.grammar_from_lark('start: a\na: a a a | a a | "a" | "aa" | "b"\n')
SLOW_MASK = 0.02
WAYS = {
    "plain": drafting("none"),
    "ngram": drafting("ngram", num_tokens=64),
    "tree": drafting("ngram", num_tokens=64, width=4),
    "prediction": drafting("prediction", num_tokens=64),
    "forced": drafting("grammar", num_tokens=64),
}


def ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer().encode(text))


class Costs:
    """Matchers of the library whose operations are counted, and take a dictated time by a clock."""

    def __init__(self, mask_seconds: float) -> None:
        self.seconds, self.mask_seconds = 0.0, mask_seconds
        self.counts: Counter[str] = Counter()

    def constrain(self, grammar: str, fields: Any = ()) -> GrammarConstraint:
        made = tiny_compiler().constraint(grammar, fields)
        made._matcher, made._renew = self.matcher(made._matcher), partial(self.renewed, made._renew)
        made.time = MaskTime(lambda: self.seconds)
        return made

    def renewed(self, renew: Any) -> Any:
        self.counts["renewals"] += 1
        return self.matcher(renew())

    def matcher(self, real: Any) -> Any:
        return _Matcher(real, self)


class _Matcher:
    def __init__(self, real: Any, costs: Costs) -> None:
        self._real, self._costs = real, costs

    def deep_copy(self) -> _Matcher:
        return _Matcher(self._real.deep_copy(), self._costs)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        self._costs.counts["tokens"] += len(token_ids)
        return int(self._real.try_consume_tokens(token_ids))

    def compute_bitmask(self) -> bytes:
        self._costs.counts["masks"] += 1
        self._costs.seconds += self._costs.mask_seconds
        return bytes(self._real.compute_bitmask())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def driver(costs: Costs) -> Driver:
    setup = Setup(num_blocks=512, max_num_seqs=32, eos_token_ids=(EOS,))
    return Driver(TinyTarget().core(setup.but(constrain=costs.constrain)))


def subject(
    name: str, way: str = "plain", grammar: str = COSTLY, num: int = 24
) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=num, min_tokens=num, temperature=0.7, seed=len(name), grammar=grammar
    )
    told = ids("aab" * 30) if way == "prediction" else ()
    wanted = replace(WAYS[way], max_speculative_tokens=64)
    return request(name, ids("aabaab"), sampling, wanted, prediction=told)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask_seconds", [0.0, SLOW_MASK])
def test_a_costly_grammar_loses_its_drafts_and_no_token(way: str, mask_seconds: float) -> None:
    costs = Costs(mask_seconds)
    made = driver(costs)
    made.submit(subject("r", way))
    most = 0
    while made.core.has_work:
        before = costs.counts["masks"]
        made.step()
        most = max(most, costs.counts["masks"] - before)
    plain = driver(Costs(0.0)).run(subject("r"))
    assert made.token_ids == plain.token_ids
    assert costs.counts["renewals"] == 0
    if mask_seconds:
        assert most == 1
    elif way == "prediction":
        assert most > 8
    if mask_seconds and way == "prediction":
        assert made.finishes["r"].speculative.disabled["masks"] > 0


def test_others_go_on_while_costly_grammars_take_turns() -> None:
    """Sixteen of them and one without: it has a token in every step, they share one budget."""
    costs = Costs(SLOW_MASK)
    made = driver(costs)
    made.submit(*(subject(f"r{at}", "prediction") for at in range(16)))
    made.step()
    made.submit(request("other", ids("ab"), SamplingParams(max_tokens=64, ignore_eos=True)))
    made.step()
    masks = costs.counts["masks"]
    for at in range(60):
        made.step()
        assert len(made.token_ids["other"]) == at + 2
    # A step's least budget is a quarter of one mask.
    assert costs.counts["masks"] - masks <= 60 / 4 + 2 * 16
    made.core.abort("r3")
    made.step()
    assert made.finishes["r3"].reason == "abort"
    while made.core.has_work:
        made.step()
    alone = driver(Costs(0.0)).run(subject("r5"))
    assert made.token_ids["r5"] == alone.token_ids["r5"]


def test_a_grammar_whose_single_masks_take_too_long_is_cut_with_the_reason() -> None:
    made = driver(Costs(0.5)).run(subject("r"))
    assert made.finishes["r"].reason == "length"
    assert len(made.token_ids["r"]) == 3
    assert "takes too long" in made.finishes["r"].cut
    once = Costs(0.0)
    cheap = driver(once)
    cheap.submit(subject("r"))
    for _ in range(24):
        once.mask_seconds = 0.5 if not cheap.num_steps % 3 else 0.0
        cheap.step()
    assert len(cheap.token_ids["r"]) > 3
    assert not cheap.finishes["r"].cut


def test_no_draft_has_the_whole_text_taken_in_again() -> None:
    """A path that runs into the parser's limits breaks its matcher; the one at the text is kept."""
    costs = Costs(0.0)
    made = costs.constrain('start: "a"* ("b" "n"{60000} | "c")')
    made.append(ids("a") * 100)
    costs.counts.clear()
    for _ in range(20):
        assert made.allowed(ids("b")) is not None
        assert made.is_cut(ids("b"))
        assert made.accepts(ids("ac"))
        made.append(ids("a"))
    assert costs.counts["renewals"] == 0
    assert costs.counts["tokens"] <= 20 * 6


@pytest.mark.parametrize(("tick", "num_times"), [(0.0, 3), (0.2, 1)])
def test_a_text_is_followed_again_a_few_times_and_not_for_long(tick: float, num_times: int) -> None:
    costs = Costs(0.0)
    made = costs.constrain("start: /[a-z]+/")
    made.append(ids("a") * 80)
    made.time.clock = map(tick.__mul__, count()).__next__
    for at in range(5):
        made._matcher.consume_token(10**6)
        assert (made.allowed(ids("b")) is not None) == (at < num_times and not tick)
        made.append(())
    assert costs.counts["renewals"] == num_times
