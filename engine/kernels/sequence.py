"""Kernels one after another, in one team of threads: none begins before the one before it is done.

Run one by one, between two kernels there is the way out to the interpreter and back, the end of a team
and the begin of the next.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from engine.kernels.compiled import Kernel
from engine.kernels.lanes import argument, call, call_int, fetch_add, read_int
from engine.kernels.waiting import function_address, releasing, wait_until

NODE_INTS = 3
"""Of a kernel: address of its machine code, of its arguments, number of threads."""


class Arg(IntEnum):
    """TEAM_SIZE and YIELD: addresses of omp_get_num_threads and sched_yield; TEAM_SIZE 0: one thread."""

    NUM_WORKERS = 0
    NUM_ARRIVED = 1
    NODES = 2
    NUM_NODES = 3
    TEAM_SIZE = 4
    YIELD = 5


def _run(p: int) -> None:
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    team = 1 if argument(p, Arg.TEAM_SIZE) == 0 else call_int(argument(p, Arg.TEAM_SIZE))
    node, end = argument(p, Arg.NODES), argument(p, Arg.NUM_NODES)
    expected = 0
    for index in range(end):
        num_threads = read_int(node + 16)
        if worker < num_threads:
            call(read_int(node), read_int(node + 8))
        node += 8 * NODE_INTS
        # What the first thread does alone it may do after what it did alone.
        if team > 1 and index + 1 < end and (num_threads > 1 or read_int(node + 16) > 1):
            expected += team
            fetch_add(p + 8 * Arg.NUM_ARRIVED, 1)
            wait_until(p + 8 * Arg.NUM_ARRIVED, expected, argument(p, Arg.YIELD))


run_all = Kernel(_run, len(Arg), is_long=True)
"""All of NODES."""


def run_sequence(nodes: int, num_nodes: int, num_threads: int) -> None:
    """``nodes``: where ``num_nodes`` times ``NODE_INTS`` int64 are."""
    # Without a way to let others run no team waits.
    team_size = function_address("omp_get_num_threads") if releasing() else 0
    told = array("q", [0, 0, nodes, num_nodes, team_size, releasing()])
    run_all.run(told.buffer_info()[0], num_threads)
