"""Candidates and costs for the gamma tests, drawn at random or dictated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hypothesis import strategies as st

from drafters.tree import DraftTree, chain
from engine.request.params import SpeculativeParams
from engine.speculation.gamma.policy import (
    DraftCandidate,
    Grant,
    Load,
    StepCost,
    grant_all,
    registered_policies,
)


@dataclass
class DictatedCost:
    """A step cost that the test writes down."""

    seconds: Callable[[int], float]

    def step_seconds_table(
        self, num_rows: int, num_extra: int, num_kv_tokens: int, num_requests: int
    ) -> Sequence[float]:
        assert num_kv_tokens >= 0
        assert num_requests > 0
        return [self.seconds(num_rows + k) for k in range(num_extra + 1)]


def grants_of(cost: StepCost, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
    """A first step under new policies."""
    policies = {kind.name: kind(cost) for kind in registered_policies()}
    return grant_all(policies, candidates, load)


def chain_candidate(
    request_id: str,
    survivals: Sequence[float],
    params: SpeculativeParams | None = None,
    max_nodes: int = 64,
) -> DraftCandidate:
    tree = chain(list(range(len(survivals))))
    return DraftCandidate(
        request_id, params or SpeculativeParams(), tree, list(survivals), max_nodes
    )


def load_of(num_requests: int, num_rows: int | None = None, num_spare_rows: int = 1000) -> Load:
    rows = num_requests if num_rows is None else num_rows
    return Load(rows, num_spare_rows, num_requests, float(num_requests), 0, num_requests, 0.0)


def is_parent_closed(tree: DraftTree, nodes: Sequence[int]) -> bool:
    kept = set(nodes)
    return all(tree.parents[node] < 0 or tree.parents[node] in kept for node in nodes)


def goodput(
    candidates: Sequence[DraftCandidate], grants: Sequence[Grant], load: Load, cost: DictatedCost
) -> float:
    """Expected tokens per second of the step with these grants."""
    gain = sum(
        candidate.survivals[node]
        for candidate, grant in zip(candidates, grants, strict=True)
        for node in grant.nodes
    )
    num_rows = load.num_rows + sum(len(grant.nodes) for grant in grants)
    return (load.expected_tokens + gain) / (load.draft_seconds + cost.seconds(num_rows))


def best_goodput(candidates: Sequence[DraftCandidate], load: Load, cost: DictatedCost) -> float:
    """Tries every way to grant: all parent-closed subsets within each request's bounds."""
    # For a given number of rows only the sum of survivals counts.
    best_gain = {0: 0.0}
    for candidate in candidates:
        most = min(
            len(candidate.tree), candidate.params.max_speculative_tokens, candidate.max_nodes
        )
        least = min(candidate.params.min_speculative_tokens, most)
        merged: dict[int, float] = {}
        for size in range(least, most + 1):
            gains = [
                sum(candidate.survivals[node] for node in nodes)
                for nodes in combinations(range(len(candidate.tree)), size)
                if is_parent_closed(candidate.tree, nodes)
            ]
            for rows, gain in best_gain.items():
                total = gain + max(gains)
                merged[rows + size] = max(merged.get(rows + size, 0.0), total)
        best_gain = merged
    return max(
        (load.expected_tokens + gain) / (load.draft_seconds + cost.seconds(load.num_rows + rows))
        for rows, gain in best_gain.items()
        if rows <= load.num_spare_rows
    )


def plain_grants(
    candidates: Sequence[DraftCandidate], load: Load, cost: DictatedCost
) -> list[list[int]]:
    """The nodes that goodput grants without hysteresis, node by node as its rule says."""
    nodes = []
    floors = 0
    granted: list[list[int]] = [[] for _ in candidates]
    tokens = load.expected_tokens
    for rank, each in enumerate(candidates):
        survivals: list[float] = []
        for parent, survival in zip(each.tree.parents, each.survivals, strict=True):
            survivals.append(min(survival, survivals[parent]) if parent >= 0 else survival)
        depths = each.tree.depths()
        own = sorted((-survivals[node], depths[node], rank, node) for node in range(len(depths)))
        params = each.params
        most = params.max_speculative_tokens
        own = own[: max(0, min(most, params.max_speculative_tokens, each.max_nodes))]
        floor = min(params.min_speculative_tokens, len(own), load.num_spare_rows - floors)
        floors += floor
        granted[rank] = [node for *_, node in own[:floor]]
        tokens -= sum(survival for survival, *_ in own[:floor])
        nodes += own[floor:]
    nodes.sort()
    best, best_rate = 0, tokens / (load.draft_seconds + cost.seconds(load.num_rows + floors))
    for count, node in enumerate(nodes[: load.num_spare_rows - floors], 1):
        tokens -= node[0]
        seconds = load.draft_seconds + cost.seconds(load.num_rows + floors + count)
        if tokens / seconds > best_rate:
            best, best_rate = count, tokens / seconds
    for *_, rank, node in nodes[:best]:
        granted[rank].append(node)
    return [sorted(each) for each in granted]


@st.composite
def random_candidates(draw: st.DrawFn, with_floors: bool = True) -> list[DraftCandidate]:
    candidates = []
    for rank in range(draw(st.integers(1, 3))):
        num_nodes = draw(st.integers(0, 5))
        parents: list[int] = []
        survivals: list[float] = []
        for node in range(num_nodes):
            parent = draw(st.integers(-1, node - 1))
            conditional = draw(st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.8, 1.0]))
            parents.append(parent)
            survivals.append(conditional * (survivals[parent] if parent >= 0 else 1.0))
        max_tokens = draw(st.integers(0, 6))
        floor = draw(st.integers(0, min(2, max_tokens))) if with_floors else 0
        candidates.append(
            DraftCandidate(
                f"r{rank}",
                SpeculativeParams(min_speculative_tokens=floor, max_speculative_tokens=max_tokens),
                DraftTree(list(range(num_nodes)), parents, [0] * num_nodes),
                survivals,
                draw(st.integers(0, 6)),
            )
        )
    return candidates


@st.composite
def random_costs(draw: st.DrawFn) -> DictatedCost:
    """Any cost that never falls in rows: flat stretches (padding) and jumps included."""
    growth = draw(
        st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3, 1.0]), min_size=24, max_size=24)
    )
    seconds = [1.0]
    for step in growth:
        seconds.append(seconds[-1] + step)
    return DictatedCost(lambda num_rows: seconds[num_rows])
