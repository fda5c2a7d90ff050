"""Drafts copied from requests' own texts, and the rows that verify them, where the tokens before are.

``copy_rows`` is ``copy_programs`` on a GPU, and a loop on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels import is_host
from engine.kernels.triton import Variant

MOST_MATCHED = 32
"""Tokens that agree before a copy are counted up to so many."""
MOST_TOKENS = 1 << 15
"""The longest text that is searched."""
NUM_COLUMNS = 6
"""Columns of a step's rows: token, position, slot, refused nodes of the draft before, the token if it was
copied (else -1, and it is a stand-in), tokens that agree before the copy."""


class Record(NamedTuple):
    """A request as the program reads it. ``place``: where its text lies; -1: nothing is copied.
    ``num_known``: tokens of the text that the host knows, the anchor of the step before last; the device
    has those before ``first_new``, and the others are told from ``new_at`` on. ``anchor_row``: of that
    anchor, with a draft of ``num_before`` nodes. ``first_row``: of the anchor to come, with one of
    ``num_nodes``, which follows a match of ``shortest`` to ``longest`` tokens. ``slots_at``: where the
    slots are told that its rows have if all nodes were refused, and of as many rows more as there were
    nodes."""

    place: int
    num_known: int
    first_new: int
    new_at: int
    anchor_row: int
    num_before: int
    first_row: int
    num_nodes: int
    shortest: int
    longest: int
    slots_at: int


def copy_rows(
    told: torch.Tensor,  # int32: records, then tokens and slots
    texts: torch.Tensor,  # [num_places, MOST_TOKENS] int32
    tokens: torch.Tensor,  # int64: what the target chose at the rows of the step before
    drafted: torch.Tensor,  # int64: the tokens of these rows
    num_requests: int,
    num_rows: int,
    most_nodes: int,
) -> torch.Tensor:
    """Returns the rows to come, ``[NUM_COLUMNS, num_rows]`` int64. Their texts take in what was accepted
    under "match" of drafts of at most ``most_nodes``, as many as the new ones have."""
    output = torch.empty(NUM_COLUMNS, num_rows, dtype=torch.int64, device=tokens.device)
    if is_host(tokens.device):
        arrays = [each.numpy() for each in (told, texts, tokens, drafted, output)]
        size = len(Record._fields)
        for first in range(0, num_requests * size, size):
            _copy_request(Record(*arrays[0][first : first + size].tolist()), *arrays)
        return output
    from engine.kernels.triton.copy_programs import copy_drafts

    constants, launch = copying_variant(most_nodes)
    sizes = texts.stride(0), num_rows
    with torch.cuda.device_of(tokens):
        copy_drafts[num_requests,](
            told, texts, tokens, drafted, output, *sizes, **constants, **launch
        )
    return output


def copying_variant(most_nodes: int) -> Variant:
    """Returns what ``copy_drafts`` is compiled for."""
    lanes = max(MOST_MATCHED, 1 << most_nodes.bit_length())
    return Variant({"TOKENS": 1024, "LANES": lanes, "MOST_MATCHED": MOST_MATCHED}, {"num_warps": 8})


_Array = NDArray[np.integer]


def _copy_request(
    a: Record, told: _Array, texts: _Array, tokens: _Array, drafted: _Array, output: _Array
) -> None:
    chosen = tokens[a.anchor_row : a.anchor_row + a.num_before + 1]
    missed = np.flatnonzero(
        drafted[a.anchor_row + 1 : a.anchor_row + a.num_before + 1] != chosen[:-1]
    )
    num_accepted = int(missed[0]) if len(missed) else a.num_before
    length = a.num_known + num_accepted + 1
    rows = output[:, a.first_row : a.first_row + a.num_nodes + 1]
    rows[0], rows[4:] = 0, [[-1], [0]]
    rows[0, 0] = chosen[num_accepted]
    rows[1] = np.arange(length - 1, length + a.num_nodes)
    first_slot = a.slots_at + num_accepted
    rows[2], rows[3] = told[first_slot : first_slot + a.num_nodes + 1], a.num_before - num_accepted
    if a.place < 0:
        return
    text = texts[a.place, :length]
    num_new = a.num_known - a.first_new
    text[a.first_new : a.num_known] = told[a.new_at : a.new_at + num_new]
    text[a.num_known :] = chosen[: num_accepted + 1]
    match = _find_match(text, a.shortest, a.longest)
    if match < 0:
        return
    # Past the text's end a copy goes on into itself.
    rows[0, 1:] = np.resize(text[match + 1 :], a.num_nodes)
    rows[4, 1:] = rows[0, 1:]
    most = min(MOST_MATCHED, match + 1)
    earlier, last = text[match + 1 - most : match + 1], text[length - most :]
    differing = np.flatnonzero((earlier != last)[::-1])
    rows[5] = differing[0] if len(differing) else most


def _find_match(text: _Array, shortest: int, longest: int) -> int:
    """Returns where the longest, then most recent, earlier occurrence of the text's last tokens ends; -1:
    there is none."""
    match, ends = -1, np.flatnonzero(text[:-1] == text[-1])
    for count in range(1, longest + 1):
        if count >= shortest and len(ends):
            match = int(ends[-1])
        ends = ends[ends >= count]
        ends = ends[text[ends - count] == text[-1 - count]] if len(ends) else ends
    return match
