"""From the text of a grammar to constraints of requests, by llguidance.

Chosen over xgrammar by measurement on trees (docs/structured_output.md): at a vocabulary of 128,000 it
masks a tree in half the time and needs 5 ms for a new schema where xgrammar takes 140, and its masks
leave the one canonical token where the grammar forces bytes, which is what drafts of forced tokens
live on.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from typing import Any, Generic, TypeVar

from engine.grammar.constraint import Fields, GrammarConstraint
from engine.grammar.trial_process import TrialProcess
from engine.grammar.vocabulary import Vocabulary, error_of, new_matcher
from engine.request.errors import RequestError

T = TypeVar("T")

_MAX_CACHED = 64
"""Compiled grammars: clients send the same few over and over."""
_MAX_FAULTS = 1024
_STACK_BYTES = 64 << 20
_NICENESS = 10


class GrammarCompiler:
    """For one tokenizer. Callable from any thread.

    ``vocab_size``: of the model's logits, never less than the tokenizer's; what the tokenizer does not
    know is never allowed. ``eos_token_ids`` end a text that may end. ``fault_of``: why a grammar cannot
    be used, "" where it can; by default it is tried in a process of its own, which begins with the first.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        fault_of: Callable[[str], str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._fault_of = fault_of or TrialProcess(lambda: self._vocabulary).fault_of
        self._admission = threading.Lock()
        self._faults = _Kept[str](_MAX_FAULTS)
        self._compiled = _Kept[Any](_MAX_CACHED)

    def prepare(self) -> None:
        """Builds the vocabulary before requests are served, since llguidance holds the interpreter for
        0.4 s at 49,000 tokens, and all streams would wait for the first grammar. An unsupported
        tokenizer does not fail the start: requests with a grammar get the error."""
        with suppress(Exception):
            _ = self._built

    def constraint(self, grammar: str, fields: Fields = ()) -> GrammarConstraint:
        """A constraint at the start of a text. ``grammar``: as llguidance's ``grammar_from_*`` give it.

        Raises RequestError where it cannot be used, naming the one of ``fields`` that is at fault, or
        the tokenizer does not fit.
        """
        _, ends = self._built, self._vocabulary.eos_token_ids
        grammar = self._vocabulary.with_ids(grammar)
        if self._compiled.get(grammar) is not None:
            matcher = self._fresh(grammar)
        else:
            self._try(grammar, fields)
            with self._admission:
                matcher = self._fresh(grammar)
        return GrammarConstraint(matcher, self._vocab_size, ends, lambda: self._fresh(grammar))

    def _try(self, grammar: str, fields: Fields) -> None:
        """Raises RequestError where the grammar cannot be used."""
        fault = self._tried(grammar)
        if not fault:
            return
        blamed = whole = ""
        for field, part in ((name, self._vocabulary.with_ids(text)) for name, text in fields):
            is_sound = field != whole and f"{field}.".startswith(f"{whole}.")
            if is_sound or part == grammar or (blamed and not field.startswith(f"{blamed}.")):
                continue
            if reason := self._tried(part):
                blamed, fault = field, reason
            else:
                whole = field
        blamed = blamed or (fields[0][0] if fields else "grammar")
        raise RequestError(blamed, f"{blamed} cannot be used: {fault}")

    def _tried(self, grammar: str) -> str:
        fault = self._faults.get(grammar)
        if fault is None:
            with self._admission:
                fault = self._faults.get(grammar)
                if fault is None:
                    fault = self._fault_of(grammar)
                    self._faults.put(grammar, fault)
        return fault

    def _fresh(self, grammar: str) -> Any:
        """A matcher at the start of a text. Copies share their lexer: where one of them has come to its
        limits, none is of use any more, and the grammar is compiled anew."""
        compiled = self._compiled.get(grammar)
        if compiled is not None:
            copy = compiled.deep_copy()
            copy.compute_bitmask()
            if not copy.is_error():
                return copy
        compiled = _aside(lambda: self._compile(grammar))
        if compiled.is_error():
            # What passed its trial has compiled there, within the same limits.
            raise RequestError("grammar", f"the grammar cannot be used: {error_of(compiled)}")
        self._compiled.put(grammar, compiled)
        return compiled.deep_copy()

    def _compile(self, grammar: str) -> Any:
        matcher = new_matcher(self._built, grammar)
        # The lexer's tables are built by the first mask, once for all copies.
        matcher.compute_bitmask()
        return matcher

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_token_ids)

    @cached_property
    def _built(self) -> Any:
        return self._vocabulary.build()


class _Kept(Generic[T]):
    """Results for the most recently requested grammars. Callable from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, T] = OrderedDict()

    def get(self, grammar: str) -> T | None:
        key = _digest(grammar)
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, grammar: str, found: T) -> None:
        with self._lock:
            self._found[_digest(grammar)] = found
            while len(self._found) > self._most:
                self._found.popitem(last=False)


def _digest(grammar: str) -> bytes:
    return sha256(grammar.encode(errors="surrogatepass")).digest()


def _aside(work: Callable[[], Any]) -> Any:
    """Returns the result of work that takes a while, in a thread that leaves the processor to others and
    has a deeper stack than a trial has. Raises what it raises."""
    result: Future[Any] = Future()

    def run() -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=run, name="slipstream-grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    return result.result()
