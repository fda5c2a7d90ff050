"""Which nodes of a static tree earn their row? Replays texts and keeps those accepted most (STAND).

Start from a wide and deep tree, decode known texts with it, count how often each node is accepted,
keep the best. A child is accepted at most as often as its parent, so what is kept is a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from drafters.base import GREEDY, DraftSampling
from drafters.tables.prob_tables import ProbTable
from drafters.tables.stand import StandDrafter, StandState
from drafters.tables.template import DraftTemplate, RankPath, best_first_paths

FIRST_NODES = 625
FIRST_DEPTH = 20
_FIRST_SHARES = (0.75, 0.12, 0.05, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008, 0.006)


@dataclass(frozen=True, slots=True)
class ReplayText:
    """A text and what the target said before each of its tokens.

    ``top_token_ids[i]`` and ``top_probs[i]`` are the target's likeliest next tokens before
    ``token_ids[i]``, best first, as in ``Observation``. ``sampling`` with the noise that the text
    was drawn with makes the replay draft what was drafted then.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    top_token_ids: Sequence[Sequence[int]]
    top_probs: Sequence[Sequence[float]]
    sampling: DraftSampling = GREEDY


def first_paths() -> list[RankPath]:
    """The tree that the search starts from."""
    return list(islice(best_first_paths(FIRST_DEPTH, _FIRST_SHARES), FIRST_NODES))


def count_accepts(text: ReplayText, paths: frozenset[RankPath], counts: dict[RankPath, int]) -> int:
    """Decode one text with a tree of ``paths``, adding to ``counts``; returns the steps it took."""
    options = StandDrafter.info.defaults()
    table = ProbTable(int(options["max_contexts"]))
    state = StandState(text.prompt_token_ids, options, table, DraftTemplate([(0,)]))
    num_prompt, num_tokens = len(text.prompt_token_ids), len(text.token_ids)
    state.read_prompt(num_prompt)
    window = state.window(text.prompt_token_ids)
    num_steps = start = 0
    while start < num_tokens:
        path: RankPath = ()
        rows = []
        for index in range(start, num_tokens):
            rows.append((window, text.top_token_ids[index], text.top_probs[index]))
            children = state.children(window, num_prompt + index, text.sampling).token_ids
            token_id = text.token_ids[index]
            window = state.advanced(window, token_id)
            rank = list(children).index(token_id) if token_id in children else None
            if rank is None or (*path, rank) not in paths:
                break
            path = (*path, rank)
            counts[path] = counts.get(path, 0) + 1
        for row in rows:
            state.learn(*row)
        start += len(rows)
        num_steps += 1
    return num_steps


def best_paths(
    counts: Mapping[RankPath, int], candidates: Iterable[RankPath], num_nodes: int
) -> list[RankPath]:
    """The ``num_nodes`` candidates accepted most, most first; closed under parents and left
    siblings.

    Where a node was accepted more often than its left sibling, that one counts as much: it is
    tried first. Among equals the shallower and likelier go first.
    """
    children: dict[RankPath, list[RankPath]] = {}
    for path in sorted(candidates):
        children.setdefault(path[:-1], []).append(path)
    worth: dict[RankPath, int] = {}
    for siblings in children.values():
        most = 0
        for path in reversed(siblings):
            most = worth[path] = max(most, counts.get(path, 0))
    order = sorted(worth, key=lambda path: (-worth[path], len(path), sum(path), path))
    return order[:num_nodes]


def search(texts: Iterable[ReplayText], num_nodes: int) -> tuple[DraftTemplate, float]:
    """The best template, and how many tokens a step of the starting tree brought.

    Raises ValueError without texts.
    """
    candidates = first_paths()
    counts: dict[RankPath, int] = {}
    num_tokens = num_steps = 0
    for text in texts:
        num_steps += count_accepts(text, frozenset(candidates), counts)
        num_tokens += len(text.token_ids)
    if not num_steps:
        raise ValueError("there is no text to learn a template from")
    return DraftTemplate(best_paths(counts, candidates, num_nodes)), num_tokens / num_steps
