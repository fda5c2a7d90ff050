"""A head without a network, which notices every wrong row and state: its rows are those of
``FakeDraftModel``, and each has to read the very state that ``ScriptedTarget`` has at its place of the
text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from drafters.base import NORMED, DrafterInfo, DrafterNeeds, HiddenRows
from drafters.model.feature_drafter import FeatureDrafter
from drafters.model.model_drafter import OPTIONS, FirstRound
from drafters.model.protocol import Candidates, DraftRows
from worlds.model_world import FakeDraftModel, Text
from worlds.scripted_target import ScriptedTarget

TARGET = ScriptedTarget(11)


@lru_cache(maxsize=4096)
def states_of(text: Text) -> list[int]:
    return TARGET.values(text)


class FakeFeatureModel(FakeDraftModel):
    """See ``drafters.model.protocol.FeatureModel``. Drafts what ``ScriptedTarget`` mostly says."""

    hidden_layers = (NORMED,)

    def __init__(
        self,
        block_size: int = 4,
        first_row: int = 1,
        keeps_anchor: bool = True,
        max_catch_up_rows: int = 64,
        max_len: int = 500,
    ) -> None:
        super().__init__(max_catch_up_rows=max_catch_up_rows, max_len=max_len)
        self.block_size = block_size
        self.first_row = first_row
        self.keeps_anchor = keeps_anchor
        self.states: dict[str, dict[int, int]] = {}
        """States by request and position: those of rows that were not run, and of the last one that
        was."""
        self.ends: dict[int, int] = {}
        """The state of a block's last token, by block."""
        self.dropped: set[int] = set()
        """Slots of rows that are of use to one draft alone."""

    def take_hidden(self, rows: Sequence[HiddenRows]) -> None:
        for slot in self.dropped:
            self.rows.pop(slot, None)
        self.dropped.clear()
        for each in rows:
            (newest,) = each.hidden
            states = self.states.setdefault(each.request_id, {})
            if each.first_position != self.known(each.request_id).stop:
                states.clear()
            for position, (state,) in enumerate(newest.tolist(), each.first_position):
                states[position] = state
                if (position + 1) % self.block_size == 0:
                    self.ends[each.block_table[position // self.block_size]] = state

    def known(self, request_id: str) -> range:
        states = self.states.get(request_id)
        return range(min(states), max(states) + 1) if states else range(0)

    def forget(self, request_id: str) -> None:
        self.states.pop(request_id, None)

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        assert sum(len(each.token_ids) for each in rows) <= self.max_catch_up_rows
        for each in rows:
            if each.base < len(each.ask.token_ids):
                self._read_states(each)
        return super().forward(rows)

    def _read_states(self, rows: DraftRows) -> None:
        """Checks the states of known tokens: the state before each; with ``keeps_anchor`` False its own,
        but the anchor's."""
        assert rows.base >= self.first_row, "a row that the method does not have"
        states = self.states.get(rows.ask.request_id, {})
        end = rows.base + len(rows.token_ids)
        shift = int(self.keeps_anchor)
        last = end if self.keeps_anchor else min(end, len(rows.ask.token_ids) - 1)
        true = states_of(tuple(rows.ask.token_ids))
        for position in range(max(0, rows.base - shift), last - shift):
            state = states.get(position)
            if state is None and position == rows.base - 1 and rows.base % self.block_size == 0:
                state = self.ends[rows.ask.block_table[position // self.block_size]]
            assert state == true[position], f"the state at {position} is not the text's"
        for position in [each for each in states if each < last - 1]:
            del states[position]
        self.dropped |= {self._slot(rows, position) for position in range(last, end)}

    def _candidates(self, text: Text, rows: DraftRows) -> Candidates:
        best = TARGET.habitual(text[-1], text[-2] if len(text) > 1 else -1)
        tokens = [best, (best + 1) % TARGET.vocab_size][: rows.num_candidates]
        return Candidates(tokens, [0.8, 0.1][: rows.num_candidates])


class FakeHead(FeatureDrafter):
    """A drafter that is never at a loss: whatever it took of a cached prefix, it has the states of the
    rest."""

    info = DrafterInfo(
        "head",
        "Reads states.",
        options=OPTIONS,
        needs=DrafterNeeds(hidden_rows=True, draft_slots=True),
    )

    def __init__(self, model: FakeFeatureModel, name: str = "head") -> None:
        super().__init__(model)
        self.model = model
        self.info = DrafterInfo(name, "Reads states.", options=OPTIONS, needs=type(self).info.needs)

    def _can_feed(self, turn: FirstRound) -> bool:
        assert super()._can_feed(turn), "a row's state is not known"
        return True
