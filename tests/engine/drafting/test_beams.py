"""What the device picks of a tree's candidates is what a growth would have picked, had it read them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape
from drafters.model.ahead import Ahead, Planned, Reader, plan_ahead
from drafters.model.growth import DraftGrowth
from drafters.model.model_drafter import Calibration
from drafters.model.protocol import Candidates, DraftRows, Levels
from drafters.tree import ROOT, chain
from engine.drafting.beams import Beams, Lanes
from engine.drafting.candidates import Choice
from worlds.lanes import examples

CPU = torch.device("cpu")
TEXT = [3, 1, 4]

TREES = st.lists(
    st.tuples(
        st.integers(2, 4), st.integers(2, 14), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.4])
    ),
    min_size=1,
    max_size=4,
)
"""Width, nodes, depth, least survival."""


def growths_of(trees: Sequence[tuple[int, int, int, float]], of: Calibration) -> list[DraftGrowth]:
    return [
        DraftGrowth(
            DraftRequest(f"{index}", TEXT, nodes, DraftShape(width, depth)),
            least,
            depth,
            of.acceptance,
        )
        for index, (width, nodes, depth, least) in enumerate(trees)
    ]


def taught(rng: random.Random) -> Calibration:
    calibration = Calibration()
    for _ in range(rng.randrange(60)):
        calibration.learn(chain([1, 2], rng.randrange(60)), [0, 1][: rng.randrange(1, 3)])
    return calibration


def choice_of(rng: random.Random, num_rows: int, most: int) -> Choice:
    """Some sure, some not, some with fewer candidates, some alike."""
    rows = []
    for _ in range(num_rows):
        sure = rng.choice([0.9, 0.5, rng.random()])
        rows.append(
            [sure * (1 - sure) ** rank if rng.random() < 0.9 else 0.0 for rank in range(most)]
        )
        rows[-1].sort(reverse=True)
    confidences = torch.tensor(rows, dtype=rng.choice([torch.float32, torch.float64]))
    tokens = torch.stack([torch.randperm(most) for _ in range(num_rows)])
    return Choice(tokens, confidences, list)


def candidates_of(choice: Choice, first: int, rows: DraftRows) -> list[Candidates]:
    found = []
    for row in range(first, first + rows.num_scored):
        pairs = zip(choice.token_ids[row].tolist(), choice.confidences[row].tolist(), strict=True)
        possible = [(token, sure) for token, sure in pairs if sure > 0][: rows.num_candidates]
        found.append(Candidates([t for t, _ in possible], [s for _, s in possible]))
    return found


def by_request(
    level: Sequence[DraftRows], choice: Choice
) -> dict[str, tuple[int, list[Candidates]]]:
    found, first = {}, 0
    for rows in level:
        found[rows.ask.request_id] = first, candidates_of(choice, first, rows)
        first += rows.num_scored
    return found


def picks_of(lanes: Lanes, tree: int, rows: DraftRows) -> list[tuple[int, int]]:
    picked = lanes.picks[tree, : rows.num_scored].tolist()
    return [divmod(pick, lanes.num_candidates) for pick in picked if pick >= 0]


@settings(max_examples=examples(60))
@given(TREES, st.integers(0, 10**6))
def test_levels_hold_what_growths_would_follow(
    trees: list[tuple[int, int, int, float]], seed: int
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    calibration = taught(rng)
    growths = growths_of(trees, calibration)
    ahead = plan_ahead(growths, 0.5, calibration.counts(), lambda of: [g for g in of if g.frontier])
    first = ahead.first([DraftRows(g.ask, [4], 2, 1, g.num_candidates) for g in growths])
    assert all(rows.beam is not None for rows in first)
    most = max(g.num_candidates for g in growths)
    choice = choice_of(rng, len(first), most)
    found = by_request(first, choice)
    beams, readers = Beams(first, CPU), {g.ask.request_id: Reader(g) for g in growths}
    for name, reader in readers.items():
        reader.start(found[name][1])
    for number, level in enumerate(ahead.levels):
        names = {rows.ask.request_id: rows for rows in level}
        counts = [names[name].num_scored if name in names else 0 for name in beams.index]
        starts = [found[name][0] if name in found else 0 for name in beams.index]
        lanes = beams.next(choice, starts, counts)
        choice = choice_of(rng, sum(counts), most)
        found = by_request(level, choice)
        for rows in level:
            tree = beams.index[rows.ask.request_id]
            check_level(readers[rows.ask.request_id], rows, lanes, tree)
        levels = Levels(
            [[], *[[]] * number, [found[rows.ask.request_id][1] for rows in level]],
            0.0,
            [
                [],
                *[[]] * number,
                [picks_of(lanes, beams.index[r.ask.request_id], r) for r in level],
            ],
        )
        read = ahead.read(number, levels)
        for name, each in read.items():
            readers[name].read(each)


def check_level(reader: Reader, rows: DraftRows, lanes: Lanes, tree: int) -> None:
    if not reader._is_along:
        return
    nodes, picks = reader.growth.frontier, picks_of(lanes, tree, rows)
    wanted = [reader._places[node] for node in nodes]
    assert picks == wanted[: rows.num_scored]
    ancestors = {ROOT: set[int]()}
    slots = dict(zip(reader.growth._stored, reader.kept, strict=True))
    for lane, node in enumerate(nodes[: rows.num_scored]):
        seen = {rows.num_stored + lane}
        above = reader.growth.nodes.parents[node]
        while above != ROOT:
            seen.add(slots[above])
            above = reader.growth.nodes.parents[above]
        ancestors[node] = seen
        assert set(lanes.seen[tree, lane].nonzero()[:, 0].tolist()) == seen


def test_levels_are_planned_for_as_many_rows_as_there_is_room_for() -> None:
    growths = growths_of([(3, 12, 9, 0.0), (2, 4, 2, 0.0), (1, 3, 9, 0.0)], Calibration())
    ahead: Ahead = plan_ahead(growths, 0.5, Calibration().counts(), with_frontier)
    sizes = [{rows.ask.request_id: rows.num_scored for rows in level} for level in ahead.levels]
    assert sizes == [{"0": 3, "1": 2, "2": 1}, {"0": 3, "2": 1}, {"0": 3}, {"0": 2}]
    assert plan_ahead(growths, 0.5, None, with_frontier).growths.keys() == {"2"}


def with_frontier(growths: Sequence[Planned]) -> list[Planned]:
    return [each for each in growths if each.frontier]
