"""Sample-and-match verification, and the trimming of what any verification emits: plain Python.

The target's token at every row is already chosen (``sampling/sampler.py``); the walk descends from the
anchor to the child that carries the target's token until there is none (drafter-invariant
speculative decoding: Daliri, Musco and Suresh, arXiv 2408.07978). A chain is a tree of width 1 and a
plain step an empty tree: there is no other path. Emitted is what the target says along the path, so
drafts change when tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drafters.tree import DraftTree
from engine.sampling.state import SampledRequest, SamplingState


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step for one request.

    ``row_token_ids[r]`` is the target's token at the request's row ``r`` (0: the anchor, ``i + 1``:
    node i); verification by rejection chooses one on the accepted path only and leaves -1 elsewhere.
    ``path`` are the rows whose KV is kept: the anchor's, then those of accepted nodes that are
    emitted. ``emitted_token_ids`` are the tokens at the path's rows 1.. and the target's last one,
    unless the run was trimmed. A stop token (EOS, a stop id) ends the run and belongs to none of it:
    it is not emitted, not billed, not cached. ``num_accepted`` counts verified drafts that were
    accepted, whatever is trimmed; ``num_emitted_drafts`` those of them that are emitted.
    """

    row_token_ids: tuple[int, ...]
    path: tuple[int, ...]
    emitted_token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: Literal["stop", "length"] | None = None
    stop_token_id: int | None = None

    @property
    def num_emitted_drafts(self) -> int:
        return len(self.path) - 1

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For every emitted token whether it was an accepted draft."""
        num_plain = len(self.emitted_token_ids) - self.num_emitted_drafts
        return (True,) * self.num_emitted_drafts + (False,) * num_plain


def verify(request: SampledRequest, row_token_ids: Sequence[int]) -> Outcome:
    """``row_token_ids`` is the target's token at each of the request's rows. Its state is read, not
    advanced: ``append`` the emitted tokens afterwards."""
    path = _accepted_path(request.draft, row_token_ids)
    return trimmed(request.sampling, tuple(row_token_ids), path)


def trimmed(state: SamplingState, row_token_ids: tuple[int, ...], path: Sequence[int]) -> Outcome:
    """The outcome of a walk along the rows ``path``, cut where the request ends."""
    target = [row_token_ids[row] for row in path]
    num_kept, finish_reason, stop_token_id = _trim(state, target)
    return Outcome(
        row_token_ids=row_token_ids,
        path=tuple(path[: 1 + min(num_kept, len(path) - 1)]),
        emitted_token_ids=tuple(target[:num_kept]),
        num_accepted=len(path) - 1,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )


def _accepted_path(tree: DraftTree, row_token_ids: Sequence[int]) -> list[int]:
    """Rows from the anchor's down. Parents precede children and siblings differ, so one pass
    does."""
    path = [0]
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        last = path[-1]
        if parent + 1 == last and token_id == row_token_ids[last]:
            path.append(node + 1)
    return path


def _trim(
    state: SamplingState, token_ids: Sequence[int]
) -> tuple[int, Literal["stop", "length"] | None, int | None]:
    """Returns how many of the tokens are emitted, left to right, and what ended them.

    A request already at its length emits nothing more.
    """
    for num_kept, token_id in enumerate(token_ids):
        if state.num_tokens + num_kept >= state.max_num_tokens:
            return num_kept, "length", None
        may_stop = state.num_output_tokens + num_kept >= state.min_num_output_tokens
        if may_stop and token_id in state.stop_token_ids:
            return num_kept, "stop", token_id
    if state.num_tokens + len(token_ids) >= state.max_num_tokens:
        return len(token_ids), "length", None
    return len(token_ids), None, None
