"""Random lives of requests in a tiny pool of a model whose layers keep a state, against a model that
knows what text each slot's state stands for: a request begins behind its own text's prefix, and nothing
is written where another reads."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvpool.prefix_cache import block_digest, root_digest
from kvpool.state_slots import NOWHERE, StateRows, StateSlots
from kvpool.tier import BlockTier
from worlds.lanes import examples
from worlds.pool_machine import ModelRequest, PoolMachine
from worlds.tier_world import ModelBytes, ModelSlots

NUM_SEATS, NUM_PLACES = 3, 12
PARTS = st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 9))


class Part(NamedTuple):
    """A request's part in a step; ``accepted``: its last nodes."""

    request_id: str
    num_known: int
    num_nodes: int
    num_accepted: int
    rows: StateRows


class StateMachine(PoolMachine):
    def _states(self, block_size: int) -> StateSlots:
        self.stored: dict[int, Any] = {}
        self.inputs: dict[int, Any] = {}
        self.num_hits = 0
        self.states = StateSlots(
            NUM_SEATS, block_size, NUM_PLACES, block_size, interval=2 * block_size
        )
        return self.states

    def _has_seat(self) -> bool:
        return len(self.model) < NUM_SEATS

    def _begin(self, request: ModelRequest, num_tokens: int) -> int:
        size, digest, begin = self.pool.block_size, root_digest(request.cache_salt), 0
        for end in range(size, num_tokens + 1, size):
            digest = block_digest(digest, request.token_ids[end - size : end])
            if self._can_begin(digest):
                begin = end
        return begin

    def _can_begin(self, digest: bytes) -> bool:
        return digest in self.states._snapshots

    def _open(self, request_id: str, request: ModelRequest, cap: int, usable: int | None) -> None:
        super()._open(request_id, request, cap, usable)
        self.num_hits += request.num_computed_tokens > 0

    def _text(self, request: ModelRequest, num_tokens: int) -> Any:
        return request.cache_salt, tuple(request.token_ids[:num_tokens])

    @rule(first=st.integers(0, 2), dice=st.lists(PARTS, min_size=1, max_size=3))
    def promote(self, first: int, dice: list[tuple[int, int, int, int]]) -> None:
        """A step. All rows are known before any is run, some requests fail before they are committed."""
        names = [*self.model]
        names = names[first:] + names[:first]
        parts = [
            (self._plan(name, *each[:3]), each[3])
            for name, each in zip(names, dice, strict=False)
        ]  # fmt: skip
        done = [(part, luck) for part, luck in parts if part is not None]
        self._forward([part for part, _ in done])
        for part, luck in done:
            if luck == 0:
                self.preempt_and_resume(part.request_id, 1, None)
            else:
                self._commit(part, luck % 2)

    def _plan(self, name: str, num_known: int, num_nodes: int, num_accepted: int) -> Part | None:
        request = self.model[name]
        base = request.num_computed_tokens
        if len(request.token_ids) == base:
            request.token_ids.append(0)
        num_known = min(num_known, len(request.token_ids) - base)
        self.allocate(name, num_known)
        if len(self.pool.block_table(name)) * self.pool.block_size < base + num_known:
            return None
        is_last = base + num_known == len(request.token_ids)
        self.allocate_draft(name, num_known + (num_nodes if is_last else 0))
        covered = len(self.pool.block_table(name)) * self.pool.block_size
        num_nodes = min(num_nodes, covered - base - num_known) if is_last else 0
        num_nodes = len(self.states.lend(name, num_nodes))
        rows = self.states.rows(name, num_known, num_nodes, len(request.token_ids))
        assert len(rows.places) == num_nodes
        return Part(name, num_known, num_nodes, min(num_nodes, num_accepted), rows)

    def _forward(self, parts: list[Part]) -> None:
        """Each walk reads the states that it needs, and no other writes there in the step."""
        wrote: dict[int, Any] = {}
        for name, num_known, _, _, rows in parts:
            request = self.model[name]
            state = self._text(request, 0) if rows.source == NOWHERE else self.stored[rows.source]
            for place in rows.replayed:
                before, state = state, self.inputs[place]
                assert state[1][:-1] == before[1]
            walked = len(state[1]) - len(rows.replayed)
            text = self._text(request, request.num_computed_tokens + num_known)
            assert state == self._text(request, request.num_computed_tokens)
            targets = {rows.target: text} | {
                slot: (text[0], text[1][: walked + count]) for count, slot in rows.snapshots.items()
            }
            assert not targets.keys() & wrote.keys()
            wrote |= targets
        for part in parts:
            others = {each.rows.source for each in parts if each != part} - {NOWHERE}
            assert not others & {part.rows.target, *part.rows.snapshots.values()}
        held = {each.source for each in self.states._tables.values()}
        seats = {part.rows.target for part in parts}
        assert not held & (wrote.keys() - seats), "somebody is about to begin there"
        self.stored |= wrote

    def _commit(self, part: Part, token: int) -> None:
        name, num_known, num_nodes, num_accepted, rows = part
        request = self.model[name]
        base, nodes = request.num_computed_tokens, range(num_nodes - num_accepted, num_nodes)
        if base + num_known == len(request.token_ids):
            request.token_ids += [token] * (num_accepted + 1)
        self.inputs |= dict.fromkeys(rows.places, ("refused", ()))
        for depth, node in enumerate(nodes, start=1):
            self.inputs[rows.places[node]] = self._text(request, base + num_known + depth)
        end = base + num_known + num_accepted
        for position in range(base, end):
            self._write(name, position, self._content(request, position))
        self.states.commit(name, num_known, nodes)
        self._promote(name, end)
        self.free_draft(name)

    @invariant()
    def snapshots_are_what_their_names_say(self) -> None:
        size = self.pool.block_size
        for digest, slot in self.states._snapshots.items():
            salt, text = self.stored[slot]
            named = root_digest(salt)
            for start in range(0, len(text), size):
                named = block_digest(named, text[start : start + size])
            assert named == digest

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "pool"):
            assert self.states.take_hits() == self.num_hits
            assert self.states.counts()["free"] == self.states.num_slots
            assert len(self.states._places) == NUM_PLACES


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)


class TieredStateMachine(StateMachine):
    """Snapshots that make room for others go to a tier, and come back from there."""

    def _states(self, block_size: int) -> StateSlots:
        states = super()._states(block_size)
        states.tier = self.tier = BlockTier(ModelBytes(self.stored, 1), ModelSlots(400))
        return states

    def _can_begin(self, digest: bytes) -> bool:
        sources = self.states._sources()
        movable = [slot for slot in self.states._snapshots.values() if slot not in sources]
        has_room = bool(self.states._free or movable)
        return super()._can_begin(digest) or (has_room and digest in self.tier)

    @rule(most=st.integers(1, 3))
    def save(self, most: int) -> None:
        """The snapshots used last are in the tier then, unless their requests have come further."""
        while self.states.save(most):
            self.states.check_integrity([*self.model])
        lasting = self.states._snapshots.keys() - self.states._passed
        assert all(digest in self.tier for digest in lasting)


TestTieredStateMachine = TieredStateMachine.TestCase
TestTieredStateMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_nothing_is_lost_over_thousands_of_requests() -> None:
    """All slots are free or hold a snapshot in the end, and so many of the requests began from one."""
    dice = random.Random(6)
    machine = StateMachine()
    machine.start(40, 2, True)
    while machine.num_opened < 2000 or machine.model:
        if machine.num_opened < 2000 and machine._has_seat():
            text = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
            machine.open(text, "", 1, None)
        parts = [tuple(dice.randrange(1, 9) for _ in range(3)) + (dice.randrange(30),)] * 3
        machine.promote(dice.randrange(3), parts)
        for name in [*machine.model]:
            if dice.random() < 0.2:
                machine.free(name)
        machine.pool.check_integrity()
    counts = machine.states.counts()
    assert counts["free"] + counts["snapshot"] == machine.states.num_slots
    assert counts["snapshot"] == 2
    assert machine.num_hits > 100
    machine.teardown()
