"""Bookkeeping of the slots of a ``StateStore``, without tensors: which request may read or write which
slot. A part of ``BlockPool``'s.

A slot is in one of four states: *free* (its content is meaningless), *seat* (one request's: the state
after its newest known token, replacing the one before), *planned* (the current step writes it, at the
end of a block) or *snapshot* (the state after a full block, found by the block's digest; evicted by
use).

Draft rows leave no trace in a slot. They keep their inputs at places; the inputs of accepted rows wait
there until the next step absorbs them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.tier import BlockTier

NOWHERE = -1
"""No slot, no place, no row, no entry: what begins there begins with zeros."""


@dataclass(slots=True)
class StateRows:
    """The slots and places that a request's rows use in a step.

    ``source``: the slot its walk starts from. ``replayed``: places of rows accepted since, in their
    order. ``target``: the slot that receives the state after the last known row. ``places``: where
    draft nodes keep their inputs, by node, and ``known_places`` the same for known rows; empty:
    nowhere. ``snapshots``: slots that receive the state after a number of replayed and known rows, by
    that number, from 1 on.
    """

    source: int = NOWHERE
    replayed: Sequence[int] = ()
    target: int = NOWHERE
    places: Sequence[int] = ()
    known_places: Sequence[int] = ()
    snapshots: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Table:
    """A request's. ``source`` holds the state behind ``num_tokens`` of its tokens: its seat, a snapshot,
    or nothing, where it begins anew. ``accepted``: places of the tokens after these. ``lent``: places of
    the step's draft nodes. ``branch``: others have this many tokens in common with it.

    ``num_prompt``: tokens of its prompt, ``interval``: between its snapshots. ``has_names``: its blocks
    get some, so that snapshots are of use. ``planned``: slots that the step writes, by the tokens before
    them, the best first. ``names``: digests of blocks by where they end, for ends that are still to be
    passed. ``newest``: of the last snapshot of its answer."""

    seat: int
    source: int
    num_tokens: int
    branch: int
    num_prompt: int
    interval: int
    has_names: bool
    accepted: list[int] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)
    planned: dict[int, int] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    newest: bytes | None = None

    @property
    def num_computed(self) -> int:
        return self.num_tokens + len(self.accepted)


class StateSlots:
    """``num_seats`` requests may be open at a time, and ``num_snapshots`` be kept beside. ``num_places``:
    of twice as many draft rows as a step may have. ``interval``: prompts leave a snapshot every so many
    tokens, a multiple of the block's size; long ones at a multiple of it, so that each leaves no more
    than its share. ``tier`` keeps snapshots that are evicted, by the digests of their blocks.
    """

    def __init__(
        self, num_seats: int, num_snapshots: int, num_places: int, block_size: int, interval: int
    ) -> None:
        self.num_slots = num_seats + num_snapshots
        self.num_places = num_places
        self._num_hits = 0
        self._size, self._interval = block_size, interval
        self._seats = list(range(num_seats - 1, -1, -1))
        self._free = list(range(self.num_slots - 1, num_seats - 1, -1))
        self._places = list(range(num_places - 1, -1, -1))
        self.num_seats = num_seats
        self._share = max(1, num_snapshots // max(1, num_seats))
        self.tier: BlockTier | None = None
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._passed: set[bytes] = set()
        """Snapshots whose requests have one further on: they are not worth a place in the tier."""
        self._nameless: set[int] = set()
        """Snapshots that were forgotten while a request was about to begin from them."""
        self._tables: dict[str, _Table] = {}

    # Life of a request

    def open(
        self, request_id: str, digests: Sequence[bytes], num_found: int, num_prompt: int
    ) -> int:
        """Gives a request its seat. ``digests``: the root's, then those of cached blocks that it could
        use, in the order of its text; ``num_found`` had their keys and values. Without a root its blocks
        get no names. Returns how many of these blocks it begins behind."""
        count = max(0, len(digests) - 1)
        while count and not self._find(digests[count]):
            count -= 1
        source = NOWHERE
        if count:
            source = self._snapshots[digests[count]]
            self._snapshots.move_to_end(digests[count])
            self._passed.discard(digests[count])
            self._num_hits += 1
        size, seat = self._size, self._seats.pop()
        self._tables[request_id] = _Table(
            seat,
            source,
            count * size,
            num_found * size,
            num_prompt,
            interval=self._interval * (1 + num_prompt // (self._interval * (self._share + 1))),
            has_names=bool(digests),
        )
        return count

    def lend(self, request_id: str, count: int) -> list[int]:
        """Returns places for so many draft nodes, fewer only where there are no more; the request's
        until ``commit``. Who drafts asks first, and drafts what finds a place."""
        table = self._tables[request_id]
        while len(table.lent) < count and self._places:
            table.lent.append(self._places.pop())
        return table.lent[:count]

    def rows(self, request_id: str, num_known: int, num_nodes: int, num_tokens: int) -> StateRows:
        """Returns what the request's rows of a step do: known ones, then draft nodes. ``num_tokens``: of
        its text so far."""
        table = self._tables[request_id]
        end = table.num_computed + num_known
        for at in self._ends(table, end, num_tokens):
            slot = self._reserve()
            if slot is None:
                break
            table.planned[at] = slot
        return StateRows(
            source=table.source,
            replayed=[*table.accepted],
            target=table.seat,
            places=self.lend(request_id, num_nodes),
            snapshots={at - table.num_tokens: slot for at, slot in table.planned.items()},
        )

    def peek(self, request_id: str, base: int, num_known: int, num_nodes: int) -> StateRows:
        """The same for rows of a model that drafts over the target's states, and leaves none: from the
        position ``base`` on, where those between the computed tokens and it ran before in this step.
        Raises IndexError where there are no places."""
        table = self._tables[request_id]
        first = base - table.num_computed
        lent = self.lend(request_id, first + num_known + num_nodes)
        if len(lent) < first + num_known + num_nodes:
            raise IndexError("no places are left for the inputs of drafts")
        known_end = first + num_known
        return StateRows(
            source=table.source,
            replayed=[*table.accepted, *lent[:first]],
            places=lent[known_end:],
            known_places=lent[first:known_end],
        )

    def _ends(self, table: _Table, end: int, num_tokens: int) -> list[int]:
        """Returns the ends of blocks that a step passes and that are worth a snapshot, best first."""
        size, first = self._size, table.num_tokens // self._size + 1
        passed = range(first * size, end + 1, size)
        if not passed or not table.has_names:
            return []
        last = passed[-1]
        wanted = [last] if end == num_tokens else []  # where the next turn will begin
        before = (num_tokens - 1) // size * size  # where the same prompt would
        wanted += [at for at in (before, table.branch) if at in passed]
        wanted += [at for at in passed if at % table.interval == 0]
        return list(dict.fromkeys(wanted))

    def commit(self, request_id: str, num_known: int, accepted: Sequence[int]) -> None:
        """The step's known rows are final, and these of its draft nodes. The rest give back their
        places."""
        table = self._tables[request_id]
        self._places += table.accepted
        table.num_tokens += len(table.accepted) + num_known
        self._move(table, table.seat)
        kept = [table.lent[node] for node in accepted]
        taken = set(kept)
        self._places += (place for place in table.lent if place not in taken)
        table.accepted, table.lent = kept, []

    def named(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """The request's block that ends there was named."""
        self._tables[request_id].names[num_tokens] = digest

    def publish(self, request_id: str) -> None:
        """Makes the step's states findable, if they have a name. A request's own snapshots after its
        answer replace each other."""
        table = self._tables[request_id]
        for at, slot in reversed(table.planned.items()):  # the best is the last to be evicted
            digest = table.names.get(at)
            if digest is None or digest in self._snapshots:
                self._free.append(slot)
                continue
            self._snapshots[digest] = slot
            if at > table.num_prompt:
                self._retire(table.newest)
                table.newest = digest
        table.planned.clear()
        table.names = {at: each for at, each in table.names.items() if at > table.num_tokens}

    def close(self, request_id: str) -> None:
        table = self._tables.pop(request_id)
        self._move(table, NOWHERE)
        self._seats.append(table.seat)
        self._free += table.planned.values()
        self._places += (*table.accepted, *table.lent)

    # Snapshots

    def evict(self, digest: bytes) -> None:
        """The snapshot of that name, if there is one, goes to the tier."""
        slot = self._snapshots.get(digest)
        if slot is None:
            return
        if self.tier is not None and digest not in self._passed:
            self.tier.keep(digest, slot)
        self._forget(digest)

    def save(self, most: int) -> bool:
        """Copy to the tier at most so many of the snapshots used last, where it outlives the process.
        False: none are left."""
        tier = self.tier
        if tier is None or not (tier.slots.is_lasting and tier.slots.is_writable):
            return False
        worth = [digest for digest in self._snapshots if digest not in self._passed]
        for digest in worth[-tier.slots.num_slots :]:
            if digest not in tier and (most <= 0 or not tier.slots.is_ready):
                return True
            most -= digest not in tier
            tier.keep(digest, self._snapshots[digest])
        return False

    def clear(self) -> None:
        """Forgets all snapshots but those of the tier; names of blocks mean nothing any more."""
        for digest in [*self._snapshots]:
            self._forget(digest)
        for table in self._tables.values():
            table.has_names = False
            table.names.clear()

    def _retire(self, digest: bytes | None) -> None:
        """It is the next to be evicted: its request has one further on."""
        if digest is not None and digest in self._snapshots:
            self._snapshots.move_to_end(digest, last=False)
            self._passed.add(digest)

    def _find(self, digest: bytes) -> bool:
        """Whether there is a snapshot of that name. One that the tier has is brought back."""
        if digest in self._snapshots:
            return True
        if self.tier is None or digest not in self.tier:
            return False
        self.tier.touch(digest)
        slot = self._reserve()
        if slot is None:
            return False
        # Its place in the tier may have gone to the one that made room.
        if digest in self.tier and self.tier.restore(digest, slot):
            self._snapshots[digest] = slot
            return True
        self._free.append(slot)
        return False

    def _forget(self, digest: bytes) -> None:
        self._passed.discard(digest)
        self._drop(self._snapshots.pop(digest))

    def _reserve(self) -> int | None:
        """Returns a free slot; the least used snapshot makes room."""
        if not self._free:
            sources = self._sources()
            for digest, slot in self._snapshots.items():
                if slot not in sources:
                    self.evict(digest)
                    break
        return self._free.pop() if self._free else None

    def _sources(self) -> set[int]:
        return {table.source for table in self._tables.values()}

    def _drop(self, slot: int) -> None:
        """Frees a slot that has lost its name, once no request is about to start from it."""
        if slot in self._sources():
            self._nameless.add(slot)
        else:
            self._free.append(slot)

    def _move(self, table: _Table, source: int) -> None:
        """The request's state lies elsewhere from now on."""
        before, table.source = table.source, source
        if before in self._nameless and before not in self._sources():
            self._nameless.remove(before)
            self._free.append(before)

    # Reading

    def take_hits(self) -> int:
        """Returns how many requests have begun from a snapshot since it was asked."""
        hits, self._num_hits = self._num_hits, 0
        return hits

    def counts(self) -> dict[str, int]:
        """Slots by state; the values add up to ``num_slots``."""
        planned = sum(len(table.planned) for table in self._tables.values())
        return {
            "free": len(self._free) + len(self._seats),
            "seat": len(self._tables),
            "planned": planned,
            "snapshot": len(self._snapshots) + len(self._nameless),
        }

    def check_integrity(self, request_ids: Sequence[str]) -> None:
        """Every slot and every place has one owner, and exactly these requests have seats. Raises
        AssertionError naming the first thing that does not hold."""
        tables = self._tables.values()
        _require(sorted(request_ids) == sorted(self._tables), "open requests and seats differ")
        slots = Counter([*self._seats, *self._free, *self._snapshots.values(), *self._nameless])
        slots.update(table.seat for table in tables)
        slots.update(slot for table in tables for slot in table.planned.values())
        _require(slots == Counter(range(self.num_slots)), "a state slot has not one owner")
        places = Counter(self._places)
        places.update(place for table in tables for place in (*table.accepted, *table.lent))
        _require(places == Counter(range(self.num_places)), "a place for rows has not one owner")
        known = {*self._snapshots.values(), *self._nameless, NOWHERE}
        for table in tables:
            begun = table.source == table.seat or table.source in known
            _require(begun, f"a request begins from slot {table.source}, which holds nothing")
            _require(table.num_tokens >= 0 and table.seat < self.num_seats, "a seat is none")
        _require(self._nameless <= self._sources(), "a forgotten snapshot is kept for nobody")
        _require(self._passed <= self._snapshots.keys(), "a snapshot that is gone was passed")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
