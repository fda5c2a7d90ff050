"""The drafter of what grammars force: the engine does its work, whoever drafts."""

from __future__ import annotations

from engine.request.params import SamplingParams
from worlds.engine_harness import Driver, Setup, TinyTarget, circle_prompt, drafting, request
from worlds.grammar_world import EOS, json_grammar, tiny_compiler

SETUP = Setup(eos_token_ids=(EOS,), constrain=tiny_compiler().constraint)
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get true weather"},
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "id"],
    "additionalProperties": False,
}


def test_forced_tokens_take_no_steps_and_are_always_accepted() -> None:
    target = TinyTarget()
    sampling = SamplingParams(temperature=0.7, max_tokens=100, grammar=json_grammar(CALL))
    plain = Driver(target.core(SETUP))
    plain.run(request("plain", circle_prompt(0), sampling))
    drafted = Driver(target.core(SETUP))
    drafted.run(request("drafted", circle_prompt(0), sampling, drafting("grammar", "goodput")))
    assert drafted.token_ids["drafted"] == plain.token_ids["plain"]
    account = drafted.finishes["drafted"].speculative
    assert account.num_accepted_tokens == account.num_draft_tokens > 20
    assert drafted.num_steps < 0.6 * plain.num_steps


def test_without_a_grammar_it_drafts_nothing() -> None:
    driver = Driver(TinyTarget().core(SETUP))
    driver.run(request("r", circle_prompt(0), None, drafting("grammar")))
    assert driver.finishes["r"].speculative.num_draft_tokens == 0
