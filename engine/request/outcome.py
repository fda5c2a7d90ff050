"""The decisions that a step makes for one request."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Outcome(NamedTuple):
    """The outcome of a step for one request.

    ``row_token_ids[r]`` is the target's token at the request's row ``r`` (0: the anchor, ``i + 1``:
    node i); verification by rejection chooses one on the accepted path only and leaves -1 elsewhere.
    ``path`` are the rows whose KV is kept: the anchor's, then those of accepted nodes that are
    emitted. ``emitted_token_ids`` are the tokens at the path's rows 1.. and the target's last one,
    unless the run was trimmed. A stop token (EOS, a stop id) ends the run and belongs to none of it:
    it is not emitted, not billed, not cached. ``num_accepted`` counts verified drafts that were
    accepted, whatever is trimmed. A tuple, since every request of every step has one.
    """

    row_token_ids: tuple[int, ...]
    path: tuple[int, ...]
    emitted_token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: Literal["stop", "length"] | None = None
    stop_token_id: int | None = None
    cut: str = ""
    """Why the request's grammar had the text end before it was whole, if it had."""

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For every emitted token whether it was an accepted draft."""
        num_drafts = len(self.path) - 1
        return (True,) * num_drafts + (False,) * (len(self.emitted_token_ids) - num_drafts)
