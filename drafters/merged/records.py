"""Data of ``auto``'s compiled loops: top tokens by context, a request's guesses, their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from compiled.records import Float64s, Int32s, Int64s


class Rows(Protocol):
    """The target's top tokens by context, in ``size`` rows, a power of two, of ``ROW_CELLS`` cells.
    ``frequent``: the tokens that it says most often, and how often each of them was said, of
    ``num_counted``."""

    cells: Int32s
    frequent: Int32s
    num_counted: int
    size: int
    num_used: int
    num_written: int


class Guess(Protocol):
    """A token that may follow a node. ``features``: its features, ``FEATURE_BITS`` each; ``chance``: of
    being accepted where the node is; ``next``: the expansion of its own node, -1: there is none.
    ``first``, ``count``: its voters, as those of a ``Child``."""

    token: int
    features: int
    chance: float
    next: int
    first: int
    count: int


class Merged(Protocol):
    """A request. ``weights`` of features: ``shared`` by all requests and its ``own``, which are added.

    Expansion e has ``counts[e]`` guesses from ``e * MOST_GUESSES`` on. ``nearly``: tokens that the
    target nearly said of late, and how likely they were, the longer ago the less.
    ``key``: of the request's noise. Nodes less likely than ``least`` are of no use.
    """

    rows: Rows
    guesses: Sequence[Guess]
    counts: Int64s
    shared: Float64s
    own: Float64s
    nearly: Int32s
    survivals: Float64s
    num_nearly: int
    num_expanded: int
    temperature: float
    least: float
    key: int


class Seen(Protocol):
    """A step that was verified: of each node its token and its parent, of each row whether its token was
    emitted and its top tokens, ``num_top`` of them, -1 where there are fewer, and ``logs``: their logits,
    which become their log-probabilities, as if there were no others."""

    tokens: Int32s
    parents: Int32s
    is_emitted: Int32s
    tops: Int32s
    logs: Float64s
    num_rows: int
    num_top: int
    num_emitted: int
