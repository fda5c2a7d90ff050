"""Recurrences with an outer product for each row: gated delta rule and Mamba 2, over walks (``walks``).

A task is a head of a walk, or some of its *slices*, 32 of a state's values: a slice takes up little of a
cache, and each value's numbers do not depend on the others'. Entries come by blocks: what a block's
entries put in is made ready, then each slice goes through all of them. Every sum runs over keys in one
order, even ones and odd ones apart, wherever an entry's inputs and the state before it lie.

States of whole slices are read and written where they lie in slots; those of drafts, and of heads whose
values are no multiple of 32, are in the worker's memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from compiled.records import Counter
from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels import lanes as v
from engine.kernels import walks as w
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats
from engine.kernels.state_steps import SLICE, WIDE, add_slice, add_wide, move_slice, move_wide

BLOCK = 8
"""Entries that are made ready at once."""


def advanced(
    state: Any,  # [key_dim, value_dim]
    key: Any,  # [key_dim]
    value: Any,  # [value_dim]
    decay: Any,  # [key_dim], or a number
    beta: float | None,
    query: Any,  # [key_dim]
) -> tuple[Any, Any]:
    """Returns a head's state behind a row, and what the row reads of it."""
    decayed = np.broadcast_to(decay, key.shape)[:, None] * state
    if beta is not None:
        value = beta * (value - key @ decayed)
    state = decayed + key[:, None] * value
    return state, query @ state


class Arguments(NamedTuple):
    """``query`` and ``key`` ``[num_rows, key_heads, key_dim]`` and ``value`` ``[num_rows, heads,
    value_dim]``, apart by ``_row`` and ``_head``; ``output``, which lies together; ``log_decay``
    ``[num_rows, heads]``, or with ``num_decays`` of a head; ``beta`` ``[num_rows, heads]``, or NOWHERE;
    ``states`` ``[slots, heads, key_dim, value_dim]``; ``kept`` ``[places, row_size]``: keys, values,
    decays, betas."""

    query: Floats
    key: Floats
    value: Floats
    output: Floats
    log_decay: Float32s
    beta: Float32s
    states: Float32s
    kept: Float32s
    step: w.Step
    query_row: int
    query_head: int
    key_row: int
    key_head: int
    value_row: int
    value_head: int
    decay_row: int
    decay_head: int
    beta_row: int
    beta_head: int
    num_rows: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    num_decays: int
    row_size: int
    normalises: bool
    scale: float
    next_task: Counter = 0
    next_row: Counter = 0
    num_workers: Counter = 0


_HAS_WIDE = asm.has_wide_registers()
"""Whether there are registers for sums of ``WIDE`` values."""
_ONE, _ZERO, _EPSILON = np.float32(1.0), np.float32(0.0), np.float32(1e-6)


def _rounded_up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


_round_up = njit(_rounded_up)


def scratch_floats(num_buffers: int, key_dim: int, value_dim: int) -> int:
    """Returns what one worker needs."""
    keys, values = _rounded_up(key_dim, LANES), _rounded_up(value_dim, SLICE)
    return BLOCK * (4 * keys + values + LANES) + values + num_buffers * key_dim * values


class Inputs(NamedTuple):
    """An entry's, in float32 with zeros up to whole lanes. ``decayed``: keys times decays; ``beta``: one
    number."""

    key: Any
    decayed: Any
    decay: Any
    query: Any
    value: Any
    beta: Any


class Memory(NamedTuple):
    """A worker's. ``inputs``: of a block's entries; ``sums``: over keys, of each value; ``buffers``: of
    whole states, slice after slice."""

    inputs: Any
    sums: Any
    buffers: Any


class Place(NamedTuple):
    """Where a slice of a state lies, and how many floats are from a key's to the next one's."""

    floats: Any
    row: int


@njit(inline="always")
def _inputs_at(a: Arguments, memory: Memory, number: int) -> Inputs:
    keys, values = _round_up(a.key_dim, LANES), _round_up(a.value_dim, SLICE)
    key = memory.inputs + number * (4 * keys + values + LANES)
    value = key + 4 * keys
    return Inputs(key, key + keys, key + 2 * keys, key + 3 * keys, value, value + values)


@njit(inline="always")
def _memory(a: Arguments, worker: int) -> Memory:
    keys, values = _round_up(a.key_dim, LANES), _round_up(a.value_dim, SLICE)
    inputs = a.step.scratch + worker * a.step.scratch_size
    sums = inputs + BLOCK * (4 * keys + values + LANES)
    return Memory(inputs, sums, sums + values)


# --- tasks ---


class Task(NamedTuple):
    """Slices ``first`` to ``end - 1`` of a head of a walk."""

    walk: Any
    head: int
    first: int
    end: int


@njit(inline="always")
def _num_slices(a: Arguments) -> int:
    return (a.value_dim + SLICE - 1) // SLICE


@njit
def _task(a: Arguments, number: int) -> Task:
    num_slices = _num_slices(a)
    num_parts = min(a.step.num_parts, num_slices)
    first, end = v.share_of(num_slices, num_parts, number % num_parts)
    head = number // num_parts
    return Task(a.step.walks[head // a.heads], head % a.heads, first, end)


# --- what entries put in ---


@njit
def _over_length(vector: Any, dim: int) -> float:
    """Returns one over a vector's length; it is filled up to whole lanes."""
    total = v.splat(_ZERO)
    for at in range(0, dim, LANES):
        x = v.load(vector, at)
        total = v.fma(x, x, total)
    return _ONE / np.sqrt(v.sum_of(total) + _EPSILON)


@njit
def _read_row(a: Arguments, row: int, head: int, inputs: Inputs) -> None:
    """Reads all but decays of a row of the step."""
    dim, key_head = a.key_dim, head * a.key_heads // a.heads
    key = a.key + (row * a.key_row + key_head * a.key_head)
    query = a.query + (row * a.query_row + key_head * a.query_head)
    w.scale(key, dim, _ONE, inputs.key)
    w.scale(query, dim, _ONE, inputs.query)
    by = np.float32(a.scale)
    if a.normalises:
        w.scale(inputs.key, dim, _over_length(inputs.key, dim), inputs.key)
        by = by * _over_length(inputs.query, dim)
    w.scale(inputs.query, dim, by, inputs.query)
    value = a.value + (row * a.value_row + head * a.value_head)
    w.scale(value, a.value_dim, _ONE, inputs.value)
    if not v.is_none(a.beta):
        inputs.beta[0] = a.beta[row * a.beta_row + head * a.beta_head]
    else:
        inputs.beta[0] = _ONE


@njit
def _read_decays(a: Arguments, source: Any, target: Any) -> None:
    """Writes one for each key."""
    if a.num_decays > 1:
        w.scale(source, a.key_dim, _ONE, target)
    else:
        for at in range(0, a.key_dim, LANES):
            v.store(target, at, v.splat(source[0]))


class Kept(NamedTuple):
    """Where a head's inputs are kept."""

    key: Any
    value: Any
    decay: Any
    beta: Any


@njit(inline="always")
def _kept_at(a: Arguments, place: int, head: int) -> Kept:
    row = a.kept + place * a.row_size
    values = row + a.key_heads * a.key_dim
    decays = values + a.heads * a.value_dim
    key = row + head * a.key_heads // a.heads * a.key_dim
    beta = decays + (a.heads * a.num_decays + head)
    return Kept(key, values + head * a.value_dim, decays + head * a.num_decays, beta)


@njit
def _read_kept(a: Arguments, kept: Kept, inputs: Inputs) -> None:
    """Reads what was kept, and no query: nobody wants to know what such a row reads."""
    w.scale(kept.key, a.key_dim, _ONE, inputs.key)
    w.scale(kept.value, a.value_dim, _ONE, inputs.value)
    _read_decays(a, kept.decay, inputs.decay)
    w.clear(inputs.query, a.key_dim)
    inputs.beta[0] = kept.beta[0]


@njit
def _keep(a: Arguments, kept: Kept, inputs: Inputs) -> None:
    """Heads that share a key write the same one."""
    w.copy(inputs.key, a.key_dim, kept.key)
    w.copy(inputs.value, a.value_dim, kept.value)
    w.copy(inputs.decay, a.num_decays, kept.decay)
    kept.beta[0] = inputs.beta[0]


@njit(inline="always")
def _prepare(a: Arguments, entry: w.Entry, head: int, inputs: Inputs) -> None:
    if entry.row >= 0:
        _read_row(a, entry.row, head, inputs)
        decays = a.log_decay + (entry.row * a.decay_row + head * a.decay_head)
        _read_decays(a, decays, inputs.decay)
        for at in range(0, a.key_dim, LANES):
            v.store(inputs.decay, at, v.exp(v.load(inputs.decay, at)))
        if entry.keep >= 0:
            _keep(a, _kept_at(a, entry.keep, head), inputs)
    else:
        _read_kept(a, _kept_at(a, entry.read, head), inputs)
    for at in range(0, a.key_dim, LANES):
        v.store(inputs.decayed, at, v.load(inputs.key, at) * v.load(inputs.decay, at))


# --- where states lie ---


@njit(inline="always")
def _is_direct(a: Arguments) -> bool:
    """Whether slots have whole slices."""
    return a.value_dim % SLICE == 0


@njit(inline="always")
def _in_slot(a: Arguments, slot: int, head: int, number: int) -> Place:
    """Returns where a slot has slice ``number`` of a head."""
    floats = a.states + (slot * a.heads + head) * a.key_dim * a.value_dim
    return Place(floats + number * SLICE, a.value_dim)


@njit(inline="always")
def _in_buffer(a: Arguments, memory: Memory, buffer: int, number: int) -> Place:
    size = a.key_dim * _round_up(a.value_dim, SLICE)
    return Place(memory.buffers + (buffer * size + number * a.key_dim * SLICE), SLICE)


@njit(inline="always")
def _slot_of(entry: w.Entry) -> int:
    return entry.store if entry.store >= 0 else entry.snapshot


@njit(inline="always")
def _before(
    a: Arguments, walk: w.Walk, entry: w.Entry, head: int, number: int, memory: Memory
) -> Place:
    """Returns where a slice of the state before an entry lies."""
    slot = walk.source if entry.parent < 0 else _slot_of(a.step.entries[entry.parent])
    if slot >= 0 and _is_direct(a):
        return _in_slot(a, slot, head, number)
    return _in_buffer(a, memory, entry.source, number)


@njit(inline="always")
def _behind(a: Arguments, entry: w.Entry, head: int, number: int, memory: Memory) -> Place:
    slot = _slot_of(entry)
    if slot >= 0 and _is_direct(a):
        return _in_slot(a, slot, head, number)
    return _in_buffer(a, memory, entry.buffer, number)


@njit
def _copy_slice(a: Arguments, source: Place, number: int, target: Place) -> None:
    count = min(SLICE, a.value_dim - number * SLICE)
    for key in range(a.key_dim):
        w.copy(source.floats + key * source.row, count, target.floats + key * target.row)


@njit
def _begin(a: Arguments, walk: w.Walk, head: int, first: int, end: int, memory: Memory) -> None:
    """Puts slices of the walk's start into its first buffer, if they are not read where they lie."""
    if walk.source >= 0 and _is_direct(a):
        return
    for number in range(first, end):
        start = _in_buffer(a, memory, 0, number)
        w.clear(start.floats, a.key_dim * SLICE)
        if walk.source >= 0:
            _copy_slice(a, _in_slot(a, walk.source, head, number), number, start)


@njit
def _store(a: Arguments, entry: w.Entry, head: int, number: int, state: Place) -> None:
    """Copies a slice of the state behind an entry to slots that have none yet."""
    if entry.snapshot >= 0 and (entry.store >= 0 or not _is_direct(a)):
        _copy_slice(a, state, number, _in_slot(a, entry.snapshot, head, number))
    if entry.store >= 0 and not _is_direct(a):
        _copy_slice(a, state, number, _in_slot(a, entry.store, head, number))


# --- a slice's step ---


@njit
def _weigh_values(given: Any, count: int, beta: float, sums: Any) -> None:
    """Writes what beta makes of values and of the sums that the decayed state has for the key."""
    by = v.splat(beta)
    for at in range(0, count, LANES):
        v.store(sums, at, by * (v.load(given, at) - v.load(sums, at)))


@njit
def _take(
    a: Arguments, walk: w.Walk, entry: w.Entry, inputs: Inputs, head: int, number: int,
    memory: Memory,
) -> None:  # fmt: skip
    """Takes a slice through an entry."""
    before = _before(a, walk, entry, head, number, memory)
    behind = _behind(a, entry, head, number, memory)
    at = number * SLICE
    sums = memory.sums + at
    if v.is_none(a.beta):
        w.copy(inputs.value + at, SLICE, sums)
    else:
        add_slice(inputs.decayed, a.key_dim, before.floats, before.row, sums)
        _weigh_values(inputs.value + at, SLICE, inputs.beta[0], sums)
    move_slice(
        a.key_dim, inputs.key, inputs.decay, inputs.query, before.floats, before.row,
        behind.floats, behind.row, sums,
    )  # fmt: skip
    if entry.row >= 0:
        output = a.output + ((entry.row * a.heads + head) * a.value_dim + at)
        w.copy(sums, min(SLICE, a.value_dim - at), output)
    _store(a, entry, head, number, behind)


@njit
def _take_wide(a: Arguments, task: Task, entry: w.Entry, inputs: Inputs, memory: Memory) -> None:
    """Takes whole values through a walk's first entry, from slot to slot: in the order of memory they are
    there sooner."""
    before = _in_slot(a, task.walk.source, task.head, 0)
    behind = _in_slot(a, _slot_of(entry), task.head, 0)
    for at in range(0, a.value_dim, WIDE):
        old, sums = before.floats + at, memory.sums + at
        if v.is_none(a.beta):
            w.copy(inputs.value + at, WIDE, sums)
        else:
            add_wide(inputs.decayed, a.key_dim, old, before.row, sums)
            _weigh_values(inputs.value + at, WIDE, inputs.beta[0], sums)
        move_wide(
            a.key_dim, inputs.key, inputs.decay, inputs.query, old, before.row,
            behind.floats + at, behind.row, sums,
        )  # fmt: skip
    if entry.row >= 0:
        output = a.output + (entry.row * a.heads + task.head) * a.value_dim
        w.copy(memory.sums, a.value_dim, output)
    for number in range(task.first, task.end):
        _store(a, entry, task.head, number, _in_slot(a, _slot_of(entry), task.head, number))


@njit
def _may_be_wide(a: Arguments, task: Task, entry: w.Entry) -> bool:
    is_whole = a.value_dim % WIDE == 0 and task.end - task.first == _num_slices(a)
    return _HAS_WIDE and is_whole and task.walk.source >= 0 and _slot_of(entry) >= 0


@njit(inline="always")
def _take_walk(a: Arguments, task: Task, memory: Memory) -> None:
    walk, head = task.walk, task.head
    _begin(a, walk, head, task.first, task.end, memory)
    for start in range(walk.first, walk.end, BLOCK):
        count = min(BLOCK, walk.end - start)
        for at in range(count):
            _prepare(a, a.step.entries[start + at], head, _inputs_at(a, memory, at))
        done = 0
        if start == walk.first and _may_be_wide(a, task, a.step.entries[start]):
            _take_wide(a, task, a.step.entries[start], _inputs_at(a, memory, 0), memory)
            done = 1
        for number in range(task.first, task.end):
            for at in range(done, count):
                entry = a.step.entries[start + at]
                _take(a, walk, entry, _inputs_at(a, memory, at), head, number, memory)


def _recur(a: Arguments) -> None:
    memory = _memory(a, v.fetch_add(a.num_workers, 1))
    num_tasks = a.step.num_walks * a.heads * min(a.step.num_parts, _num_slices(a))
    for begin, end in v.shared_runs(a.next_task, num_tasks, a.step.num_threads):
        for number in range(begin, end):
            _take_walk(a, _task(a, number), memory)
    size = a.heads * a.value_dim
    for row in v.shared(a.next_row, a.num_rows - a.step.num_rows):
        w.clear(a.output + (a.step.num_rows + row) * size, size)


recur = Kernel(_recur, is_long=True)
"""Takes all walks' states through their entries, and writes what rows read and what is kept of them."""
