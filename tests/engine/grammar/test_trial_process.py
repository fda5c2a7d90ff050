"""A grammar may break or block the process that tries it, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

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


def test_one_whose_process_was_killed_is_tried_again() -> None:
    """That says nothing of the grammar, and what is said is kept."""
    before = children()
    trials = TrialProcess(lambda: Vocabulary.of(tiny_tokenizer(), TINY_VOCAB, (EOS,)))
    assert trials.fault_of('start: "a"') == ""
    (process,) = children() - before
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        told = pool.submit(trials.fault_of, 'start: "b"')
        wait([told], 0.2)
        os.kill(process, signal.SIGKILL)
        assert told.result() == ""
    trials.close()


def children() -> set[int]:
    """The processes that this thread has started."""
    return {int(each) for each in Path("/proc/thread-self/children").read_text().split()}
