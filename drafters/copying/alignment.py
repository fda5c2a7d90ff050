"""The current copy: which part of which text, where copies broke off and where they may resume.

Owned by the ``suffix`` drafter. An edit is a copy with interruptions: after the changed tokens it
resumes near where it broke off, so places there are tried first, and on little evidence, while a place
anywhere else has to show a longer match. Replacements are remembered: an edit that renames something
does so at every occurrence of the name. The loops are compiled (``records.py``, and the files that end
in ``_loops``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from compiled.records import Memory, address_of
from drafters.copying.alignment_loops import extend_alignment
from drafters.copying.candidate_loops import MAX_ENDS, ROOM_FOR_CANDIDATES
from drafters.copying.correction_loops import MAX_CORRECTIONS
from drafters.copying.draft_loops import write_draft
from drafters.copying.records import (
    NO_TEXT,
    OWN_TEXT,
    Branch,
    Candidate,
    Child,
    Correction,
    End,
    Node,
    State,
    Voter,
)
from drafters.copying.records import Desk as DeskFields
from drafters.copying.suffix_index import IndexedText, TenantHistory
from drafters.copying.vote_loops import LISTS_OF_NODE, MOST_VOTING, ROOM_FOR_JOINING
from drafters.copying.weights import MAX_MATCH_LENGTH, WORTH
from drafters.tree import EMPTY, DraftTree, chain

MAX_INDEXED_TOKENS = 32_768
_NODES = 32
_WIDTH = 8


class Desk:
    """Room to draft in, for one request after the other; it grows with what is asked for."""

    def __init__(self) -> None:
        self._extend = extend_alignment.compile()
        self._draft = write_draft.compile()
        self._num_nodes, self._width = 0, 0
        self.candidates = Memory(Candidate, ROOM_FOR_CANDIDATES)
        self._make_room(_NODES, _WIDTH)

    def extend(self, state: Memory, end: int) -> None:
        """Has the request whose state it is follow its text up to ``end``."""
        self._extend(state.address, end)

    def draft(self, state: Memory, num_nodes: int, width: int, depth: int) -> DraftTree:
        """Returns a draft for the request whose state it is."""
        width = min(width, MOST_VOTING)
        self.make_room(num_nodes, width)
        count = self._draft(state.address, self.told.address, num_nodes, width, depth)
        if count == 0:
            return EMPTY
        token_ids, parents, features = self.drafted(count)
        return chain(token_ids, features) if width == 1 else DraftTree(token_ids, parents, features)

    def drafted(self, count: int) -> tuple[list[int], list[int], list[int]]:
        """Returns tokens, parents and features of the nodes that a loop has written."""
        drafted = self._drafted[: 3 * count].tolist()
        return drafted[::3], drafted[1::3], drafted[2::3]

    def make_room(self, num_nodes: int, width: int) -> None:
        """For drafts of so many nodes, each with so many children that may come into it."""
        if num_nodes > self._num_nodes or width > self._width:
            self._make_room(max(num_nodes, self._num_nodes), max(width, self._width))

    def _make_room(self, num_nodes: int, width: int) -> None:
        self._num_nodes, self._width = num_nodes, width
        num_branches = (num_nodes + 1) * width
        self._records = {
            "voters": Memory(Voter, ROOM_FOR_CANDIDATES + 1 + num_nodes * (ROOM_FOR_JOINING + 1)),
            "children": Memory(Child, MOST_VOTING + 1),
            "branches": Memory(Branch, num_branches),
            "nodes": Memory(Node, num_nodes),
        }
        self._lists = array("q", bytes(8 * (num_nodes + 1) * LISTS_OF_NODE))
        self._heap = array("q", bytes(8 * (num_branches + 1)))
        self._ending = array("i", bytes(4 * (MAX_MATCH_LENGTH + num_nodes)))
        self._drafted = array("i", bytes(4 * 3 * num_nodes))
        self.told = Memory(DeskFields)
        for name, records in self._records.items():
            self.told[name] = records.address
        self.told["lists"], self.told["heap"] = address_of(self._lists), address_of(self._heap)
        self.told["ending"] = address_of(self._ending)
        self.told["drafted"] = address_of(self._drafted)


class Alignment:
    """One request's text, its index, and the current copy.

    Text that is being copied from a place already indexed is not indexed again, but for the last tokens
    before the copy breaks off: its contexts lead to the original. So a step costs next to nothing while
    a long copy lasts.

    Memory: the text's (``IndexedText``), with at most ``MAX_INDEXED_TOKENS`` indexed, beyond that anew
    from the last half of them; and 19 KB.
    """

    def __init__(self, token_ids: Sequence[int], history: TenantHistory | None, desk: Desk) -> None:
        """``token_ids``: the live text, so far the prompt."""
        self._text = IndexedText(OWN_TEXT)
        self._live = token_ids
        self._history = history
        self._desk = desk
        self._corrections = Memory(Correction, MAX_CORRECTIONS)
        self._ends = Memory(End, MAX_ENDS)
        state = self._state = Memory(State)
        state["own"] = self._text.told.address
        state["worth"] = address_of(WORTH)
        state["ends"], state["corrections"] = self._ends.address, self._corrections.address
        state["candidates"] = desk.candidates.address
        state["source"] = NO_TEXT
        state["open_correction"] = state["open_general"] = state["correcting"] = -1
        state["num_prompt_tokens"], state["max_indexed"] = len(token_ids), MAX_INDEXED_TOKENS
        self._num_tokens = 0
        self._take(token_ids)
        if history is not None:
            self._expect(history.beginning(token_ids))
        self._text.told["num_tokens"] = self._num_tokens

    @property
    def token_ids(self) -> list[int]:
        """A copy of the text so far."""
        return self._text.token_ids

    @property
    def position(self) -> int | None:
        """The next token of the copy under way; None: there is none."""
        if self._state["source"] == NO_TEXT:
            return None
        return self._state["position"]

    @property
    def length(self) -> int:
        """How many tokens before it agree with the text's last ones."""
        return self._state["length"]

    def read(self, num_tokens: int) -> int:
        """Indexes up to ``num_tokens`` more tokens of the request's live text, before anything of it is
        followed; how many it was."""
        text = self._text
        self._take(self._live)
        text.told["num_tokens"] = self._num_tokens
        start = text.num_indexed
        if self._num_tokens - self._state["first_indexed"] > self._state["max_indexed"]:
            start = self._num_tokens - self._state["max_indexed"] // 2
            self._state["first_indexed"] = start
            text.forget(start)
        end = min(self._num_tokens, start + num_tokens)
        if start < end:
            text.index(end)
        return end - start

    def extend(self, token_ids: Sequence[int]) -> None:
        """Follows what ``token_ids`` has beyond what is known."""
        if self._take(token_ids) or self._text.num_indexed < self._state["num_prompt_tokens"]:
            self._desk.extend(self.told(), self._num_tokens)

    def draft(self, num_nodes: int, width: int, depth: int) -> DraftTree:
        """Returns a draft of what may come next, a chain where ``width`` is 1."""
        return self._desk.draft(self.told(), num_nodes, width, depth)

    def finish(self) -> None:
        """Hands the text to the tenant's history."""
        if self._history is not None:
            token_ids, num_prompt = self._text.token_ids, self._state["num_prompt_tokens"]
            self._history.add(token_ids)
            self._history.note_beginning(token_ids[:num_prompt], self._state["copied_from"])

    def _expect(self, position: int) -> None:
        """Expects the output to begin as a copy of what stands at ``position``, as if a copy had broken
        off there."""
        if position > 0:
            self._ends["position"] = position
            self._ends["text"], self._state["num_ends"] = OWN_TEXT, 1

    def _take(self, token_ids: Sequence[int]) -> bool:
        """Whether there was something new."""
        new = token_ids[self._num_tokens :]
        if not new:
            return False
        self._text.append(new)
        self._num_tokens += len(new)
        return True

    def told(self) -> Memory:
        """Returns the state as compiled loops know it."""
        history = self._history
        if history is not None:
            self._state["young"] = history.young.told.address
            self._state["old"] = history.old.told.address
        return self._state
