"""A grammar may break or block the process that tries it, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from engine.grammar.trial_process import TrialProcess
from engine.grammar.vocabulary import Vocabulary
from worlds.engine_harness import TINY_VOCAB
from worlds.grammar_world import EOS, tiny_tokenizer

CHAIN = "\n".join(f"r{at}: r{at + 1}" for at in range(4000)) + '\nr4000: "a"\nstart: r0'
PATTERNS = {"allOf": [{"type": "string", "pattern": f"a{{{at},}}"} for at in range(1, 30)]}
SLOW = LLMatcher.grammar_from_json_schema(json.dumps(PATTERNS))


@pytest.fixture(scope="module")
def trials() -> Iterator[TrialProcess]:
    made = TrialProcess(lambda: Vocabulary.of(tiny_tokenizer(), TINY_VOCAB, (EOS,)))
    yield made
    made.close()


def test_one_that_breaks_it_or_keeps_it_busy_is_refused_and_others_are_tried_anew(
    trials: TrialProcess,
) -> None:
    assert trials.fault_of('start: "a"') == ""
    assert "nested too deeply" in trials.fault_of(CHAIN)
    assert trials.fault_of("start: start").startswith("it matches nothing")
    assert "does not compile within" in trials.fault_of(SLOW)
    assert trials.fault_of('start: "a"') == ""
