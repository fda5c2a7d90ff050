"""A grammar is tried before a request is admitted with it: compiled, looked at, and followed for some
tokens.

The library bounds most of what it does, but not all: a chain of a few thousand rules overflows the
stack, and a schema of one kilobyte compiles for minutes. So trials run in a process of their own
(``trial_process.py``), where both are harmless. What passes is compiled again in the engine's process.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.grammar.vocabulary import error_of, new_matcher

_NUM_WALKS = 4
_WALK_TOKENS = 32
_WALK_SECONDS = 0.05
_STEP_SECONDS = 0.05
"""The limit for a mask, or for consuming a token: in the engine every request of the step waits for it.
"""
_NOWHERE = "NoExtensionBias"
_INNER = re.compile(r"#\d+|start(#\d+)?|gg(#\d+)?|.*_")


def fault_of(vocabulary: Any, grammar: str) -> str:
    """Returns why a grammar cannot be served; "" where it can. ``vocabulary``: an LLTokenizer.

    It cannot where it does not compile within the library's limits, where it or a rule that it uses
    matches nothing, or where its first tokens, followed in a few ways, run into a limit or take too
    long.
    """
    matcher, told = _compile(vocabulary, grammar)
    if matcher.is_error():
        return _plain(error_of(matcher))
    if endless := endless_rule(read_rules(told)):
        return endless
    matcher.compute_bitmask()
    if matcher.is_error():
        return _plain(error_of(matcher))
    seconds = time.thread_time() + _WALK_SECONDS
    for seed in range(_NUM_WALKS):
        if fault := _walk(matcher.deep_copy(), random.Random(seed), vocabulary, seconds):
            return fault
    return ""


def _plain(error: str) -> str:
    if error.startswith(_NOWHERE):
        return "it matches nothing"
    if error.startswith("panic"):
        return "its compiler failed"
    return error.removeprefix("Parser Error: ").removeprefix("parser error: ")


def _walk(matcher: Any, rng: random.Random, vocabulary: Any, end: float) -> str:
    """Follow some text of the grammar. ``end``: of this thread's time. Returns what is wrong."""
    ends = set(vocabulary.eos_tokens)
    for _ in range(_WALK_TOKENS):
        begin = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return _on_the_way(matcher)
        allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        going_on = [token_id for token_id in allowed if token_id not in ends]
        if not going_on:
            return ""
        matcher.consume_token(rng.choice(going_on))
        if matcher.is_error():
            return _on_the_way(matcher)
        now = time.thread_time()
        if now - begin > _STEP_SECONDS:
            return f"it is too complex: a token takes {now - begin:.2f} s"
        if now > end:
            return ""
    return ""


def _on_the_way(matcher: Any) -> str:
    error = error_of(matcher)
    if error.startswith(_NOWHERE):
        return "there are beginnings of texts that it leaves no way to end"
    return f"it is too complex: {_plain(error)}"


# --- rules ---


class Rules(NamedTuple):
    """``of[symbol]``: the sequences of symbols it expands to. A symbol without any is a terminal;
    ``empty`` are the terminals that match no text."""

    of: Mapping[str, Sequence[Sequence[str]]]
    empty: frozenset[str]


def read_rules(told: str) -> Rules:
    """Reads the rules off what llguidance tells of a grammar at log level 3. There is no other way to
    them; a word that is not understood counts as a terminal that matches something."""
    lexemes, _, rest = told.partition("\nGrammar:\n")
    body, _, _ = rest.partition("\nstats: ")
    found: dict[str, list[list[str]]] = defaultdict(list)
    symbol = ""
    for line in body.splitlines():
        left, arrow, right = line.partition(" ⇦ ")
        if arrow:
            symbol = left.strip().removesuffix("::_") or symbol
            found[symbol].append([each.removesuffix("::_") for each in right.split()])
    empty = re.findall(r"^  \[\d+\] (\S+)  \((?:ExprRef ∅|NoMatch|Or)\)", lexemes, re.MULTILINE)
    return Rules(found, frozenset(empty))


def endless_rule(rules: Rules) -> str:
    """Returns, in words, that a rule which the grammar uses matches nothing: either no text at all, or
    none that ends. "" where there is none."""
    finite = _finite(rules)
    endless = [symbol for symbol in _used(rules) if symbol not in finite]
    if not endless:
        return ""
    if "start" in endless:
        named = [symbol for symbol in endless if not _INNER.fullmatch(symbol)]
        by = f": no text of {_name(named[0])} ends" if named else ", or no text that ends"
        return f"it matches nothing{by}"
    named = [symbol for symbol in endless if not _INNER.fullmatch(symbol)]
    return f"no text of {_name(named[0])} ends" if named else "a part of it matches nothing"


def _name(symbol: str) -> str:
    return repr(symbol.removeprefix("json-schema:///"))


def _finite(rules: Rules) -> set[str]:
    """Symbols that match some text."""
    waiting: dict[str, list[tuple[str, int]]] = defaultdict(list)
    missing: dict[tuple[str, int], int] = {}
    found: set[str] = set()
    ready: list[str] = []
    for symbol, sequences in rules.of.items():
        for index, sequence in enumerate(sequences):
            parts = {each for each in sequence if each in rules.of or each in rules.empty}
            missing[symbol, index] = len(parts)
            for part in parts:
                waiting[part].append((symbol, index))
            if not parts:
                ready.append(symbol)
    while ready:
        symbol = ready.pop()
        if symbol in found:
            continue
        found.add(symbol)
        for key in waiting[symbol]:
            missing[key] -= 1
            if missing[key] == 0:
                ready.append(key[0])
    return found


def _used(rules: Rules) -> Iterable[str]:
    """Symbols that the start leads to, nearest first."""
    seen: dict[str, None] = dict.fromkeys(["start"] if "start" in rules.of else [])
    queue = [*seen]
    for symbol in queue:
        for sequence in rules.of.get(symbol, ()):
            for each in sequence:
                if each in rules.of and each not in seen:
                    seen[each] = None
                    queue.append(each)
    return seen


def _compile(vocabulary: Any, grammar: str) -> tuple[Any, str]:
    """Returns the matcher and what llguidance told of it on standard error, which goes nowhere else
    meanwhile: not for a process that does other work."""
    before = os.dup(2)
    pad = os.memfd_create("told")
    try:
        os.dup2(pad, 2)
        matcher = new_matcher(vocabulary, grammar, log_level=3)
        return matcher, os.pread(pad, os.fstat(pad).st_size, 0).decode(errors="replace")
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(pad)
