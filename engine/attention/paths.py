"""Branches of draft trees that read their keys in the order of their text.

A tree's nodes lie in the store as the drafter made them: the first branch in the order of its text, the
others with keys of strangers between their ancestors. Masked where they lie, those would change how a
kernel groups its sums. So scores, which are worked out for all rows at once, are put into the order of a
row's text, and values are read in it, in the last chunk alone: the chunks before are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafters.tree import chain_length
from engine.batch import RequestRows


@dataclass(frozen=True, slots=True)
class Path:
    """Rows of a draft tree whose last keys do not lie in the order of their text. ``rows``: numbers among
    the request's, or among those of a part of it. Keys number ``start`` and after of their text lie where
    keys number ``columns`` of the request do; the last of these are the rows' own."""

    rows: Sequence[int]
    start: int
    columns: Sequence[int]

    @property
    def end(self) -> int:
        """The key after the last."""
        return self.start + len(self.columns)

    @property
    def first_place(self) -> int:
        """The first row's own key, in its text."""
        return self.end - len(self.rows)


@dataclass(frozen=True, slots=True)
class PathRows:
    """What a call does for paths. ``rows[i]`` of all its rows has the score of its key number ``keys[i]``
    at ``columns[i]``."""

    rows: torch.Tensor  # [num_moved] int64
    keys: torch.Tensor
    columns: torch.Tensor
    chunks: Sequence[PathChunk]


@dataclass(frozen=True, slots=True)
class PathChunk:
    """One chunk of values in the order of ``num_paths`` texts. ``rows``: of all the call's, equally many
    for each path (one may come several times). ``slots``: where each path's values of the chunk lie."""

    number: int
    num_paths: int
    rows: torch.Tensor  # [num_paths * rows_per_path] int64
    slots: torch.Tensor  # [num_paths * keys of the chunk] int64


def side_paths(request: RequestRows) -> list[Path]:
    """Branch after branch, each as deep as it goes, but for the chain that lies as its text does."""
    parents = request.parents
    root_end = request.base + request.num_known  # the first node's slot
    placed = set(range(chain_length(parents)))
    paths = []
    for start in range(len(placed), len(parents)):
        if start in placed:
            continue
        branch = [start]
        for node in range(start + 1, len(parents)):
            if parents[node] == branch[-1] and node not in placed:
                branch.append(node)
        placed.update(branch)
        nodes = branch[:]
        while parents[nodes[0]] >= 0:
            nodes.insert(0, parents[nodes[0]])
        in_place = next(index for index, node in enumerate(nodes) if node != index)
        paths.append(
            Path(
                rows=[request.num_known + node for node in branch],
                start=root_end + in_place,
                columns=[root_end + node for node in nodes[in_place:]],
            )
        )
    return paths


def lay_out(
    paths_of: Sequence[Sequence[Path]],
    num_rows: int,
    row_multiple: int,
    num_keys: int,
    key_chunk: int | None,
    block_ids: np.ndarray[Any, Any],
    device: torch.device,
) -> PathRows | None:
    """Of the paths of each branch of a call, whose branches have ``num_rows`` rows each; None: there are
    none. ``block_ids``: where each branch's keys lie ``[num_branches, num_blocks]``. ``row_multiple``:
    what numbers of rows are padded to."""
    paths = [(branch, path) for branch, mine in enumerate(paths_of) for path in mine]
    if not paths:
        return None
    moved = [each for branch, path in paths for each in _moved(path, branch * num_rows)]
    rows, keys, columns = torch.tensor(moved, device=device).unbind(1)
    width, block_size = key_chunk or num_keys, num_keys // block_ids.shape[1]
    chunks = []
    for number in range(-(-num_keys // width)):
        first, end = number * width, min((number + 1) * width, num_keys)
        mine = [(branch, path) for branch, path in paths if path.start < end and path.end > first]
        if not mine:
            continue
        most = max(len(path.rows) for _, path in mine)
        most = -(-most // row_multiple) * row_multiple
        chunk_rows = np.empty((len(mine), most), dtype=np.int64)
        chunk_slots = np.empty((len(mine), end - first), dtype=np.int64)
        for index, (branch, path) in enumerate(mine):
            chunk_rows[index] = branch * num_rows + path.rows[0]
            chunk_rows[index, : len(path.rows)] += np.array(path.rows) - path.rows[0]
            lying = np.arange(first, end)
            inside = slice(max(path.start, first), min(path.end, end))
            lying[inside.start - first : inside.stop - first] = path.columns[
                inside.start - path.start : inside.stop - path.start
            ]
            blocks, places = np.divmod(lying, block_size)
            chunk_slots[index] = block_ids[branch, blocks] * block_size + places
        chunks.append(
            PathChunk(
                number,
                len(mine),
                torch.from_numpy(chunk_rows.reshape(-1)).to(device),
                torch.from_numpy(chunk_slots.reshape(-1)).to(device),
            )
        )
    return PathRows(rows, keys, columns, chunks)


def _moved(path: Path, first_row: int) -> Iterator[tuple[int, int, int]]:
    """(row, key, column) of each score that does not lie where its text has it."""
    for index, row in enumerate(path.rows):
        seen = path.first_place + index + 1 - path.start
        for place, column in enumerate(path.columns[:seen]):
            if column != path.start + place:
                yield first_row + row, path.start + place, column
