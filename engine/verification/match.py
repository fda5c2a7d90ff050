"""Sample-and-match verification, and the trimming of what any verification emits: plain Python.

The target's token at every row is already chosen (``sampling/sampler.py``); the walk descends from the
anchor to the child that carries the target's token until there is none (drafter-invariant
speculative decoding: Daliri, Musco and Suresh, arXiv 2408.07978). A chain is a tree of width 1 and a
plain step an empty tree: there is no other path. Emitted is what the target says along the path, so
drafts change when tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from drafters.tree import DraftTree
from engine.request.outcome import Outcome
from engine.sampling.state import SampledRequest, SamplingState


def verify(request: SampledRequest, row_token_ids: Sequence[int]) -> Outcome:
    """``row_token_ids`` is the target's token at each of the request's rows. Its state is read, not
    advanced: ``append`` the emitted tokens afterwards."""
    path = _accepted_path(request.draft, row_token_ids)
    return trimmed(request.sampling, tuple(row_token_ids), path)


def trimmed(state: SamplingState, row_token_ids: tuple[int, ...], path: Sequence[int]) -> Outcome:
    """The outcome of a walk along the rows ``path``, cut where the request ends."""
    target = [row_token_ids[row] for row in path]
    num_left = state.max_num_tokens - state.num_tokens
    if len(target) < num_left and state.stop_token_ids.isdisjoint(target):  # as nearly always
        return Outcome(row_token_ids, tuple(path), tuple(target), len(path) - 1)
    num_kept, finish_reason, stop_token_id = _trim(state, target)
    cut = "" if finish_reason != "stop" else _cut(state, target[:num_kept])
    if cut:
        finish_reason, stop_token_id = "length", None
    return Outcome(
        row_token_ids=row_token_ids,
        path=tuple(path[: 1 + min(num_kept, len(path) - 1)]),
        emitted_token_ids=tuple(target[:num_kept]),
        num_accepted=len(path) - 1,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        cut=cut,
    )


def _cut(state: SamplingState, token_ids: Sequence[int]) -> str:
    """Returns why a text that is stopped after these tokens had to be; "" where it is whole."""
    return "" if state.grammar is None else state.grammar.is_cut(tuple(token_ids))


def _accepted_path(tree: DraftTree, row_token_ids: Sequence[int]) -> list[int]:
    """Rows from the anchor's down. Parents precede children and siblings differ, so one pass
    does."""
    path = [0]
    if not tree.token_ids:
        return path
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
