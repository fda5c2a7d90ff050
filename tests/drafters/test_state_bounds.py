"""Drafters' memories are bounded, in the bytes that ``docs/drafters/memory.md`` states.

The bounds are scaled down to a thousand things, and states filled with what costs most.
"""

from __future__ import annotations

import random
import re
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType

import pytest

from drafters.base import Drafter, Observation, OptionValue
from drafters.copying import alignment as suffix_alignment
from drafters.copying import ngram as ngram_index
from drafters.merged.merging import MAX_ROWS
from drafters.parallel import lookahead
from drafters.registry import build_drafters, drafter_names
from drafters.tree import EMPTY

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "drafters" / "memory.md"
FREE = tuple(build_drafters())
NUM = 1_024
"""Things of a kind that scaled states may hold."""
VOCABULARIES = (8, 25, 20_000)
"""Few tokens fill contexts with continuations, many fill tables with contexts."""
OPTIONS: Mapping[str, Mapping[str, OptionValue]] = {
    "nasd_one_level": {"max_contexts": NUM},
    "nasd": {"max_contexts": NUM},
    "stand": {"max_contexts": NUM},
    "recycling": {"max_rows": NUM},
}
KEEPS = {"suffix", "stand", "recycling", "auto"}
"""Drafters that remember something of a request once it has ended, if asked to."""


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "MAX_INDEXED_TOKENS", NUM)
    monkeypatch.setattr(suffix_alignment, "MAX_INDEXED_TOKENS", NUM)
    monkeypatch.setattr(lookahead, "_MAX_KEYS", NUM // 7)


def rows(table: int) -> dict[str, list[str]]:
    """Returns one of the page's tables: cells by drafter."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    lines = [line.strip("|").split("|") for line in tables[table].splitlines()[2:]]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def stated_bytes(name: str) -> int:
    return int(rows(0)[name][2].replace(",", ""))


def size_of(thing: object, but: object = None) -> int:
    """Bytes of an object and all that it holds, functions and classes aside."""
    seen = {id(but)}
    total, stack = 0, [thing]
    while stack:
        each = stack.pop()
        if id(each) in seen or each is None or isinstance(each, type | bool) or _is_code(each):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            stack += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            stack += each
        elif type(each).__module__.startswith("drafters"):
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            stack += [
                getattr(each, name, None) for name in (*slots, *getattr(each, "__dict__", ()))
            ]
    return total


def _is_code(thing: object) -> bool:
    return isinstance(thing, FunctionType | MethodType | BuiltinFunctionType)


def largest(drafter: Drafter, vocabulary: int, num_tokens: int) -> tuple[int, int]:
    """The most bytes that a request of random tokens takes, over its course, and how much of them is
    the copy that ``suffix`` keeps of the text."""
    rng = random.Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(NUM)]
    empty = size_of(drafter)
    drafter.open("r", text, OPTIONS.get(drafter.info.name, {}), "tenant")
    if drafter.info.takes_prediction:
        drafter.predict("r", [rng.randrange(vocabulary) for _ in range(NUM)])
    most = 0
    for index in range(num_tokens):
        text.append(rng.randrange(vocabulary))
        tops = list({rng.randrange(vocabulary): None for _ in range(drafter.num_top_tokens("r"))})
        probs = [rng.random() / 10 for _ in tops]
        drafter.observe([Observation("r", text, EMPTY, [0], [0], text[-1:], [tops], [probs])])
        if index % 512 == 0:
            most = max(most, size_of(drafter, but=text) - empty)
    drafter.close("r")
    return most, 40 * len(text)


def test_the_page_lists_every_drafter() -> None:
    assert set(rows(0)) == set(drafter_names())
    assert set(rows(1)) == KEEPS


@pytest.mark.parametrize("name", sorted(set(FREE) - {"none", "grammar", "auto"}))
def test_a_request_takes_no_more_than_stated(name: str) -> None:
    for vocabulary in VOCABULARIES:
        drafter = build_drafters([name])[name]
        most, text = largest(drafter, vocabulary, 3 * NUM)
        num = min(vocabulary, NUM * 4) if name == "jacobi" else NUM
        assert most <= num * stated_bytes(name) + (text if name == "suffix" else 4_096)


def test_auto_keeps_a_text_and_what_it_is_drafted_with() -> None:
    auto = build_drafters(["auto"])["auto"]
    most, text = largest(auto, 25, NUM)
    suffix, _ = largest(build_drafters(["suffix"])["suffix"], 25, NUM)
    # Weights, guesses of a draft, the prediction of as many tokens; the table is the tenant's.
    assert most <= suffix + 8_192 + 48 * 33 * 17 + stated_bytes("prediction") * NUM + MAX_ROWS * 80


@pytest.mark.parametrize("name", FREE)
def test_what_stays_after_a_request_is_what_the_page_says(name: str) -> None:
    drafter = build_drafters([name])[name]
    options = {option.name: True for option in drafter.info.options if option.name == "share"}
    empty = size_of(drafter)
    rng = random.Random(1)
    for index in range(3):
        text = [rng.randrange(1_000) for _ in range(200)]
        drafter.open(f"r{index}", text, options, "tenant")
        for _ in range(50):
            text.append(rng.randrange(1_000))
            tops = list(range(drafter.num_top_tokens(f"r{index}")))
            probs = [0.5 / (1 + rank) for rank in tops]
            seen = Observation(f"r{index}", text, EMPTY, [0], [0], text[-1:], [tops], [probs])
            drafter.observe([seen])
        drafter.close(f"r{index}")
    assert (size_of(drafter) > empty + 2_000) == (name in KEEPS)
