"""Compiled: where the last tokens of a text occurred before, in it or in another text.

Contexts of all lengths share one hash
table without deletions, which holds the newest place after each context; every place links to the one
before it. So a context costs four bytes in the table, twice over, and a place four bytes, and all of its
occurrences can be walked, newest first.

A place is a position in a text, always behind the context.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from compiled.loops import Loop, callee
from compiled.records import Int32s
from drafters import contexts
from drafters.copying.records import Text

NUM_LEVELS = 3
"""Contexts have 1, 2 and 4 tokens: ``1 << level``."""
_LEVEL_BITS, _LEVEL_MASK = 2, 3


@callee
def hash_tokens(tokens: Any, end: int, length: int) -> int:
    """Returns a hash of the ``length`` tokens before ``tokens[end]``."""
    mixed = length * 0x1E3779B97F4A7C15
    for at in range(end - length, end):
        mixed = (mixed ^ tokens[at]) * 0x2545F4914F6CDD1D
        mixed ^= mixed >> 29
    return mixed


num_equal_before = njit(contexts.num_equal_before)


@callee
def _slot(text: Text, ending: Any, end: int, level: int) -> int:
    """Returns where in the table the context before ``ending[end]`` is, or would be."""
    tokens, table = text.tokens, text.table
    length, mask = 1 << level, text.table_size - 1
    at = hash_tokens(ending, end, length) & mask
    while table[at] != 0:
        entry = table[at]
        if entry & _LEVEL_MASK == level:
            place = entry >> _LEVEL_BITS
            if num_equal_before(tokens, place, ending, end, length) == length:
                return at
        at = (at + 1) & mask
    return at


@callee
def index(text: Text, start: int, end: int) -> None:
    """Indexes the contexts that end at the tokens ``start`` .. ``end - 1``; none has a negative token."""
    tokens, table = text.tokens, text.table
    links = text.links
    for place in range(start + 1, end + 1):
        length = 0
        for level in range(NUM_LEVELS):
            while length < 1 << level and length < place and tokens[place - 1 - length] >= 0:
                length += 1
            if length < 1 << level:
                break
            at = _slot(text, tokens, place, level)
            if table[at] == 0:
                text.num_contexts += 1
            links[NUM_LEVELS * place + level] = table[at] >> _LEVEL_BITS
            table[at] = (place << _LEVEL_BITS) | level
    text.num_indexed = max(end, start)


@callee
def find(text: Text, ending: Any, end: int, level: int, place: int) -> int:
    """Returns the newest place after the context before ``ending[end]``, or the one before ``place``,
    where that is one; 0: there is none."""
    if place > 0:
        return text.links[NUM_LEVELS * place + level]
    if end < 1 << level or text.num_contexts == 0:
        return 0
    return text.table[_slot(text, ending, end, level)] >> _LEVEL_BITS


@callee
def forget(text: Text, start: int) -> None:
    """Empties the index; the next token to be indexed is ``start``."""
    table = text.table
    for at in range(text.table_size):
        table[at] = 0
    text.num_contexts, text.num_indexed = 0, start


def _find(text: Text, ending: Int32s, end: int, most: int, limit: int, places: Int32s) -> int:
    """Writes up to ``limit`` places, those of the longest context first, newest first, ``most`` of each
    length; returns how many."""
    count = 0
    for level in range(NUM_LEVELS - 1, -1, -1):
        place = 0
        for _ in range(most):
            place = find(text, ending, end, level, place)
            if place == 0 or count == limit:
                break
            is_new = True
            for at in range(count):
                is_new = is_new and places[at] != place
            if is_new:
                places[count] = place
                count += 1
    return count


def _move(text: Text, table: Int32s, size: int) -> None:
    """Moves the index to another table, of zeros."""
    tokens, before = text.tokens, text.table
    for at in range(text.table_size):
        entry = before[at]
        if entry:
            slot = hash_tokens(tokens, entry >> _LEVEL_BITS, 1 << (entry & _LEVEL_MASK)) & (
                size - 1
            )
            while table[slot]:
                slot = (slot + 1) & (size - 1)
            table[slot] = entry


index_text = Loop(index.py_func)
find_places = Loop(_find)
forget_index = Loop(forget.py_func)
move_index = Loop(_move)
