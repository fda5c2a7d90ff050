"""The branches of draft trees, for backends whose rows read their keys in the order of their text."""

from __future__ import annotations

from collections.abc import Iterator

from engine.batch import RequestRows


def branches_of(request: RequestRows) -> Iterator[tuple[list[int], list[int]]]:
    """Yields paths from the root down, as deep as they go, and which of their nodes have rows in this
    step and were in no path before."""
    parents = request.parents
    placed = set(range(request.num_stored))
    for start in range(request.num_stored, len(parents)):
        if start in placed:
            continue
        mine = [start]
        for node in range(start + 1, len(parents)):
            if parents[node] == mine[-1] and node not in placed:
                mine.append(node)
        placed.update(mine)
        nodes = mine[:]
        while parents[nodes[0]] >= 0:
            nodes.insert(0, parents[nodes[0]])
        yield nodes, mine
