"""``grammar``: the tokens that a request's grammar leaves no choice about, and nothing else.

Under every drafter they lead the draft, and forbidden tokens are left out of it: the engine sees to both
(``engine.speculation.constrained``). This one adds nothing to them, so it costs nothing: for tool calls
and JSON in texts where nothing repeats.
"""

from __future__ import annotations

from drafters.base import Drafter, DrafterInfo, drafter


@drafter
class GrammarDrafter(Drafter):
    """Proposes nothing of its own."""

    info = DrafterInfo(
        "grammar",
        "Drafts what the request's grammar forces: punctuation, keys and names of JSON and tool calls. "
        "Every other drafter begins with them, too.",
        drafts_trees=False,
        cost="nothing but its rows",
    )
