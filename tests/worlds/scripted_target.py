"""A target without a network that notices every error in its keys and values.

A slot of its store holds what a real layer's would: a value made of the row's token, its position and
everything the row saw. The next token's distribution is made of that value, so a stale, misplaced or
foreign slot changes the text; and a slot read at another position than it was written for raises.
It has the core's ``Runner`` face and costs some ten microseconds a row. These values are its hidden
states, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from engine.batch import ForwardOutput, InputBatch, RequestRows, settle, slot_of
from engine.core import EngineCore
from engine.request.params import GenerationRequest
from engine.sampling.state import SamplingState
from worlds.engine_harness import Setup, build_core
from worlds.sampled_rows import RowGroup, sample_tokens

_NUM_LOGIT_ROWS = 512
_MASK = (1 << 61) - 1


class ScriptedTarget:
    """``habit`` of 16 times the next token follows from the last two, so that drafts come true; else
    from the whole context. ``sharpness`` is the spread of its logits."""

    def __init__(self, vocab_size: int, habit: int = 13, sharpness: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        self.vocab_size = vocab_size
        self._habit = habit
        self._bank = sharpness * torch.randn(_NUM_LOGIT_ROWS, vocab_size, generator=generator)
        self._likeliest = self._bank.argmax(dim=-1).tolist()

    def core(self, setup: Setup) -> EngineCore:
        runner = ScriptedRunner(self, setup.num_blocks, setup.block_size)
        return build_core(runner, self.vocab_size, setup)

    def value(self, token_id: int, position: int, seen: Sequence[int]) -> int:
        """Returns the value that a row leaves in its slot; ``seen`` are the values it sees, in order of
        position."""
        # hash() of integers is the same in every process.
        return hash((token_id, position, *seen)) & _MASK

    def logit_row(self, value: int, token_id: int, previous: int) -> int:
        if value % 16 < self._habit:
            return hash((token_id, previous)) % _NUM_LOGIT_ROWS
        return (value >> 8) % _NUM_LOGIT_ROWS

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """``[len(rows), vocab_size]``"""
        return self._bank[list(rows)]

    def values(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the values that the rows of a text leave, one after the other."""
        values: list[int] = []
        for position, token_id in enumerate(token_ids):
            values.append(self.value(token_id, position, values))
        return values

    def habitual(self, token_id: int, previous: int) -> int:
        """The token that mostly follows these."""
        return int(self._likeliest[hash((token_id, previous)) % _NUM_LOGIT_ROWS])

    def stream(
        self, each: GenerationRequest, eos_token_ids: Sequence[int], max_model_len: int
    ) -> tuple[list[int], str]:
        """Returns what the request has to get, by the definition: one token at a time, nothing reused."""
        return _stream(self, _Hashable(each, eos_token_ids, max_model_len))

    def _stream(
        self, each: GenerationRequest, eos_token_ids: Sequence[int], max_model_len: int
    ) -> tuple[list[int], str]:
        state = SamplingState(each, eos_token_ids, self.vocab_size, max_model_len)
        token_ids = list(each.prompt_token_ids)
        most = min(len(token_ids) + each.sampling.max_tokens, max_model_len)
        values: list[int] = []
        while len(token_ids) < most:
            for position in range(len(values), len(token_ids)):
                values.append(self.value(token_ids[position], position, values))
            previous = token_ids[-2] if len(token_ids) > 1 else -1
            row = self.logit_row(values[-1], token_ids[-1], previous)
            if state.is_greedy and not state.processors:
                token_id = self._likeliest[row]
            else:
                token_id = sample_tokens(self.logits([row]), [RowGroup(state, 0)])[0]
            num_output = len(token_ids) - len(each.prompt_token_ids)
            if num_output >= each.sampling.min_tokens and token_id in state.stop_token_ids:
                return token_ids[len(each.prompt_token_ids) :], "stop"
            token_ids.append(token_id)
            state.append([token_id])
        return token_ids[len(each.prompt_token_ids) :], "length"


class _Hashable:
    """A reference's arguments, equal where the text is: ids, drafters and neighbours do not matter."""

    def __init__(
        self, each: GenerationRequest, eos_token_ids: Sequence[int], max_model_len: int
    ) -> None:
        self.arguments = (each, eos_token_ids, max_model_len)
        self.key = repr((each.prompt_token_ids, each.sampling, eos_token_ids, max_model_len))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and other.key == self.key


@lru_cache(maxsize=4096)
def _stream(target: ScriptedTarget, arguments: _Hashable) -> tuple[list[int], str]:
    return target._stream(*arguments.arguments)


class ScriptedRunner:
    """One engine's store and forward. Satisfies ``engine.core.Runner``."""

    def __init__(self, target: ScriptedTarget, num_blocks: int, block_size: int) -> None:
        self._target = target
        self._block_size = block_size
        self._slots: list[_Entry | None] = [None] * (num_blocks * block_size)

    def forward(self, batch: InputBatch) -> ForwardOutput:
        batch = settle(batch, self._block_size)
        written = set(batch.slot_mapping)
        assert len(written) == len(batch.slot_mapping), "two rows of a step share a slot"
        bank_rows, values = [-1] * batch.num_rows, [0] * batch.num_rows
        for rows in batch.requests:
            self._run(batch, rows, written, bank_rows, values)
        logits = self._target.logits([bank_rows[row] for row in batch.logits_indices])
        states = torch.tensor(values)[:, None]
        return ForwardOutput(logits, (states,) * len(batch.hidden_layers))

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        assert len(set(target_slots)) == len(target_slots)
        found = [self._slots[slot] for slot in source_slots]
        for slot, entry in zip(target_slots, found, strict=True):
            self._slots[slot] = entry

    def _run(
        self,
        batch: InputBatch,
        rows: RequestRows,
        written: set[int],
        bank_rows: list[int],
        values: list[int],
    ) -> None:
        """Write a request's rows; note for each which row of logits it gets, and its value."""
        seen, previous = self._context(rows, written)
        seen_by: list[list[int]] = []
        for index in range(rows.num_rows):
            row = rows.first_row + index
            node = index - rows.num_known
            if node >= 0:
                parent = rows.num_known + rows.parents[node]  # ROOT, -1, is the last known row
                seen, previous = seen_by[parent], batch.token_ids[rows.first_row + parent]
            token_id, position = batch.token_ids[row], batch.positions[row]
            value = self._target.value(token_id, position, seen)
            slot = slot_of(rows.block_table, rows.base + index, self._block_size)
            assert slot == batch.slot_mapping[row]
            self._slots[slot] = (position, token_id, value)
            values[row] = value
            bank_rows[row] = self._target.logit_row(value, token_id, previous)
            seen = [*seen, value]
            seen_by.append(seen)
            previous = token_id

    def _context(self, rows: RequestRows, written: set[int]) -> tuple[list[int], int]:
        """The values of the committed slots, and the last of their tokens."""
        values: list[int] = []
        token_id = -1
        size = self._block_size
        for position in range(rows.base):
            slot = rows.block_table[position // size] * size + position % size
            entry = self._slots[slot]
            assert entry is not None, "a slot is read that was never written"
            assert slot not in written, "a committed slot is overwritten"
            assert entry[0] == position, "a slot holds another position's row"
            token_id = entry[1]
            values.append(entry[2])
        return values, token_id


_Entry = tuple[int, int, int]
"""Position, token id and value of the row that a slot holds."""
