"""Data of ``suffix``'s compiled loops: texts, a request's state, room to draft in.

Texts are named by their serial numbers: ``OWN_TEXT`` is the request's, the others belong to its
tenant's history, and may be removed while it is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from compiled.records import Float64s, Int32s, Int64s

OWN_TEXT, NO_TEXT = 0, -1


class Text(Protocol):
    """A text that is indexed. ``table_size`` is a power of two, at least twice ``num_contexts``; the
    first token that is not indexed is ``num_indexed``, of those before it some may be left out;
    ``serial`` tells texts apart."""

    tokens: Int32s
    links: Int32s
    table: Int32s
    table_size: int
    num_tokens: int
    num_indexed: int
    num_contexts: int
    serial: int


class Candidate(Protocol):
    """The continuation at a position of a text; ``match`` tokens before it agree. ``place`` is a
    ``Place``."""

    text: int
    position: int
    match: int
    place: int
    weight: float


class End(Protocol):
    """A place where a copy broke off."""

    text: int
    position: int


class Correction(Protocol):
    """A mistake of copies so far: after the token ``previous`` they proposed ``original``, and the text
    had the ``num_actual`` tokens at ``actual_at`` in place of the ``num_original`` at ``original_at``
    of another. Both numbers are -1 until it is known where copying resumed.

    ``num_broken``: how often a copy broke off there, 0 if this entry is free; ``num_right``: how often
    it did not after the first time.
    """

    previous: int
    original: int
    actual_at: int
    num_actual: int
    original_text: int
    original_at: int
    num_original: int
    num_broken: int
    num_right: int


class State(Protocol):
    """A request. ``young`` and ``old`` may be nowhere; ``worth`` is ``weights.WORTH``.

    The text ends with the ``length`` tokens before ``position`` of the text ``source``, or nothing is
    copied, and ``source`` is ``NO_TEXT``. ``num_lost``: tokens since a trusted copy broke off, 0 while
    there is one. ``ends``: where trusted copies broke off, the newest first. ``open_correction``: the one
    whose end is not known, -1: there is none.
    """

    own: Text
    young: Text
    old: Text
    worth: Float64s
    ends: Sequence[End]
    candidates: Sequence[Candidate]
    corrections: Sequence[Correction]
    source: int
    position: int
    length: int
    is_trusted: int
    has_copied: int
    num_lost: int
    num_ends: int
    num_learnt: int
    open_correction: int
    open_general: int
    correcting: int
    broke_source: int
    broke_position: int
    broke_length: int
    broke_end: int
    copied_from: int
    num_prompt_tokens: int
    first_indexed: int
    max_indexed: int


class Voter(Protocol):
    """A place: at depth d it says what stands at ``start + d`` of ``text``, and from depth ``switch`` on
    what stands at ``next_start + d`` of ``next_text``.

    ``match + d`` tokens before that agree. A run in the request's own text repeats itself past the text's
    end, from ``base``, where it began. ``weight``: of its vote at depth 0.
    """

    text: int
    start: int
    base: int
    switch: int
    next_text: int
    next_start: int
    next_base: int
    match: int
    place: int
    weight: float


class Child(Protocol):
    """A token that is voted for: the sum of its votes, and its ``count`` voters from ``first`` on in
    ``Desk.lists``, the longest match first."""

    token: int
    first: int
    count: int
    weight: float


class Branch(Protocol):
    """A node that may come into the tree, with its voters; ``weight`` is its survival."""

    parent: int
    token: int
    feature: int
    depth: int
    first: int
    count: int
    weight: float


class Node(Protocol):
    token: int
    parent: int
    feature: int
    place: int


class Desk(Protocol):
    """Room to draft in. ``ending``: the text's last tokens and a path; ``drafted``: token, parent and
    feature of each node."""

    voters: Sequence[Voter]
    lists: Int64s
    children: Sequence[Child]
    branches: Sequence[Branch]
    heap: Int64s
    nodes: Sequence[Node]
    ending: Int32s
    drafted: Int32s
    num_voters: int
    num_listed: int
    num_branches: int
