"""Kernels one after another, in one team of threads: none begins before the one before it is done.

Run one by one, between two kernels there is the way out to the interpreter and back, the end of a team
and the begin of the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled.records import Counter, Int64s
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel, function_address, releasing

NODE_INTS = 3
_CODE, _ARGUMENTS, _NUM_THREADS = range(NODE_INTS)
"""A node is a kernel: addresses of its machine code and of its arguments, its number of threads."""


class Arguments(NamedTuple):
    """``nodes`` ``[num_nodes, NODE_INTS]``. ``team_size`` and ``release``: omp_get_num_threads and
    sched_yield, as ``function_address`` returns them; without a ``team_size`` there is one thread."""

    nodes: Int64s
    num_nodes: int
    team_size: int
    release: int
    num_workers: Counter = 0
    num_arrived: Counter = 0


def _run(a: Arguments) -> None:
    worker = v.fetch_add(a.num_workers, 1)
    team = 1 if a.team_size == 0 else v.call_int(a.team_size)
    expected = 0
    for index in range(a.num_nodes):
        node = a.nodes + NODE_INTS * index
        following = node + NODE_INTS
        if worker < node[_NUM_THREADS]:
            v.call(node[_CODE], node[_ARGUMENTS])
        # What the first thread does alone it may do after what it did alone.
        is_last = team == 1 or index + 1 == a.num_nodes
        if not is_last and (node[_NUM_THREADS] > 1 or following[_NUM_THREADS] > 1):
            expected += team
            v.fetch_add(a.num_arrived, 1)
            v.wait_until(a.num_arrived, expected, a.release)


run_all = Kernel(_run, is_long=True)
"""Runs all of the nodes."""


def run_sequence(nodes: torch.Tensor, num_threads: int) -> None:
    """``nodes`` ``[num_nodes, NODE_INTS]`` int64: kernels, which run in this order."""
    # Without a way to let others run no team waits.
    team_size = function_address("omp_get_num_threads") if releasing() else 0
    run_all.run(Arguments(nodes, len(nodes), team_size, releasing()), num_threads)
