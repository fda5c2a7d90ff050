"""Whose turn it is: a commit runs some of the slow tests, and commits in a row run them all."""

from __future__ import annotations

from zlib import crc32

NUM_TURNS = 4


def has_turn(test: str, turn: int) -> bool:
    """Returns whether a slow test, by its id, runs in this turn, one of ``NUM_TURNS``. Ids
    decide, so tests that are added do not move others to another turn."""
    return crc32(test.encode()) % NUM_TURNS == turn % NUM_TURNS
