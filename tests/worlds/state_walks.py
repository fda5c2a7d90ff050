"""Made-up steps of operations with a state, and texts that are served by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import RequestRows
from engine.states.plan import Convolution, Recurrence, StatePlan
from engine.states.work import StateWork, state_work
from kvpool.state_slots import NOWHERE, StateRows
from kvpool.state_store import StateShape, StateStore

NUM_SLOTS, NUM_PLACES = 40, 256
MOST_NODES = 12
Asked = Convolution | Recurrence
Backend = Callable[[StateStore, StateWork], StatePlan]


def store_of(*shapes: StateShape) -> StateStore:
    """A store in which nothing is zero."""
    store = StateStore(shapes, NUM_SLOTS, NUM_PLACES, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    for each in (*store.states, *store.rows):
        each.normal_(generator=generator).mul_(0.5)
    return store


def run(plan: StatePlan, asked: Asked, op: int = 0) -> Tensor:
    return plan.convolve(op, asked) if isinstance(asked, Convolution) else plan.recur(op, asked)


def picked(asked: Asked, rows: Sequence[int]) -> Asked:
    """The same of some rows."""
    if isinstance(asked, Convolution):
        return asked._replace(rows=asked.rows[rows])
    query, key, value, log_decay = (each[rows] for each in asked[:4])
    beta = None if asked.beta is None else asked.beta[rows]
    return Recurrence(query, key, value, log_decay, beta, *asked[5:])


@dataclass
class Neighbours:
    """Draws requests. No slot that one reads is another's to write, and no place that is read is kept.
    Slots below 4 are read by many; of the others those from ``first_slot`` on are drawn, and places from
    ``first_place`` on."""

    random: Random
    first_slot: int = 4
    first_place: int = 0
    _slots: list[int] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)

    def requests(self, count: int, first_row: int) -> list[RequestRows]:
        self._slots = list(range(self.first_slot, NUM_SLOTS))
        self._places = list(range(self.first_place, NUM_PLACES))
        made = []
        for _ in range(count):
            made.append(self._request(first_row))
            first_row += made[-1].num_rows
        return made

    def _slot(self) -> int:
        return self._slots.pop(self.random.randrange(len(self._slots)))

    def _run_of_places(self, count: int) -> list[int]:
        run, self._places = self._places[:count], self._places[count:]
        return run

    def _request(self, first_row: int) -> RequestRows:
        draw = self.random
        num_known, num_nodes = draw.choice([0, 1, 1, 2, 5, 19]), draw.randrange(MOST_NODES)
        source = draw.choice([NOWHERE, draw.randrange(4), self._slot()])
        target = source if source >= 4 and draw.random() < 0.5 else self._slot()
        replayed = self._run_of_places(draw.choice([0, 0, 1, 3, 9]))
        draw.shuffle(replayed)
        num_chain = len(replayed) + num_known
        snapshots = {1 + draw.randrange(num_chain): self._slot()} if num_chain else {}
        parents = [draw.randrange(-1, node) for node in range(num_nodes)]
        num_stored = draw.choice([0, 0, draw.randrange(num_nodes + 1)])
        places = self._run_of_places(num_nodes)
        kept = self._run_of_places(num_known) if draw.random() < 0.2 else []
        states = StateRows(source, replayed, target, places, kept, snapshots)
        return rows_of(states, first_row, num_known, parents, num_stored)


def rows_of(
    states: StateRows, first_row: int, num_known: int, parents: Sequence[int], num_stored: int = 0
) -> RequestRows:
    tokens = [0] * (num_known + len(parents) - num_stored)
    return RequestRows(
        *(tokens, num_known, 0, parents, (), 0, num_stored), states=states, first_row=first_row
    )


class TextStep(NamedTuple):
    """Known rows and a draft tree, of which the nodes ``accepted`` are the text's next rows."""

    num_known: int
    parents: Sequence[int] = ()
    accepted: Sequence[int] = ()


class Served(NamedTuple):
    """The outputs of a text's rows, and the state behind the last."""

    outputs: Tensor
    state: Tensor


def served(
    asked: Asked, length: int, steps: Sequence[TextStep], backend: Backend, company: int = 0
) -> Served:
    """Serves a text whose rows are the first ``length`` of ``asked``, in ``steps``; those behind are what
    wrong drafts and ``company`` requests before and after ask."""
    store, random = store_of(asked.shape), Random(length)
    home, done, outputs = 4, 0, []
    replayed: list[int] = []
    for number, step in enumerate(steps):
        others = Neighbours(random, first_slot=6, first_place=2 * MOST_NODES)
        made = others.requests(2 * company, 0)
        before, after = made[:company], made[company:]
        first_row, first_place = sum(each.num_rows for each in before), number % 2 * MOST_NODES
        source = home if done else NOWHERE
        places = range(first_place, first_place + len(step.parents))
        rows = StateRows(source, replayed, home, places)
        mine = rows_of(rows, first_row, step.num_known, step.parents)
        moved = [replace(each, first_row=each.first_row + mine.num_rows) for each in after]
        work = state_work([*before, mine, *moved])

        asks = random.choices(range(length, length + 50), k=work.num_rows + company)
        known = [first_row + index for index in range(step.num_known)]
        mine_at = [*known, *(first_row + step.num_known + node for node in step.accepted)]
        for offset, row in enumerate(mine_at):
            asks[row] = done + offset
        outputs.append(run(backend(store, work), picked(asked, asks))[mine_at])
        done += len(mine_at)
        replayed = [first_place + node for node in step.accepted]
    assert done == length
    assert not replayed
    return Served(torch.cat(outputs), store.states[0][home])
