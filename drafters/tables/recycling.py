"""``recycling``: what the target rated likeliest after each token, drafted as a tree.

Token Recycling (Luo et al. 2024, arXiv 2408.08696): ``matrix[token]``, the target's top k after a
token, is rewritten from every verified row, accepted or not, and fills a static tree of 80 nodes. Here
rows of branches that were not accepted are written first, so the text's own word stands; tokens that
the target was not asked about yet fall back on what followed them in the prompt; and rows are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from drafters.base import (
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    Options,
    TextReader,
    drafter,
)
from drafters.tables.sharing import SHARE_OPTION, Generations, SharingDrafter
from drafters.tables.template import (
    Children,
    DraftTemplate,
    RankPath,
    best_first_paths,
    grow,
    grow_chain,
)
from drafters.tree import DraftTree

Matrix: TypeAlias = Generations[tuple[int, ...]]

MAX_K = 8
SHARED_ROWS = 65_536
LEVEL_SIZES = (8, 21, 25, 15, 8, 3)
"""Nodes per depth, as published: 80."""
RANK_SHARES = (0.667, 0.068, 0.029, 0.018, 0.013, 0.009, 0.006, 0.005)
"""The share of next tokens that were the rank-th of their row, over 80 texts of the bundled model; it
orders the template."""
_NUM_DEPTHS = 8
_FEATURES = [[rank * _NUM_DEPTHS + depth for rank in range(MAX_K)] for depth in range(_NUM_DEPTHS)]
"""Features by tokens between the anchor and the node, and by its rank among its siblings: 0..63."""


def level_template(level_sizes: Sequence[int], shares: Sequence[float]) -> DraftTemplate:
    """Returns the likeliest nodes of every depth, by the product of their ranks' shares."""
    left = list(level_sizes)
    chosen: set[RankPath] = {()}
    paths = []
    for path in best_first_paths(len(level_sizes), shares):
        if left[len(path) - 1] and path[:-1] in chosen:
            left[len(path) - 1] -= 1
            chosen.add(path)
            paths.append(path)
        if not any(left):
            break
    return DraftTemplate(paths)


@drafter
class RecyclingDrafter(SharingDrafter[Matrix]):
    info = DrafterInfo(
        "recycling",
        "Recycles the target's likeliest tokens of every verified row: a matrix of successors per "
        "token, drafted as a static tree. Knows something after every token, but only from one "
        "token of context.",
        options=(
            DrafterOption("k", MAX_K, "Successors remembered per token.", 1, MAX_K),
            DrafterOption(
                "max_rows",
                32_768,
                "Tokens whose successors are remembered; the least recently seen go first. A shared "
                "matrix has its own bound.",
                1_024,
                1e6,
            ),
            SHARE_OPTION,
        ),
        cost="Microseconds of CPU time; the target's k likeliest tokens per verified row.",
    )

    def __init__(self) -> None:
        super().__init__(
            lambda options: Generations(int(options["max_rows"])), lambda: Generations(SHARED_ROWS)
        )
        self._template = level_template(LEVEL_SIZES, RANK_SHARES)

    def state_over(self, request: NewRequest, table: Matrix) -> RecyclingState:
        return RecyclingState(request.token_ids, request.options, table, self._template)


class RecyclingState(TextReader):
    """One request. Its matrix may be shared with requests of the same tenant."""

    def __init__(
        self, token_ids: Sequence[int], options: Options, matrix: Matrix, template: DraftTemplate
    ) -> None:
        super().__init__(token_ids)
        self.num_top_tokens = int(options["k"])
        self._matrix = matrix
        self._template = template
        self._prompt: Matrix = Generations(int(options["max_rows"]))

    def _read(self, start: int, end: int) -> None:
        new = self._token_ids[max(0, start - 1) : end]
        for token_id, successor in zip(new, new[1:], strict=False):
            row = self._prompt.get(token_id) or ()
            if not row or row[0] != successor:
                others = [each for each in row if each != successor]
                row = (successor, *others[: self.num_top_tokens - 1])
            self._prompt.put(token_id, row)

    def observe(self, observation: Observation) -> None:
        """One row of the matrix per verified row; among rows of one token the last one stands."""
        top_token_ids = observation.top_token_ids
        if top_token_ids is None:
            return
        num_before = len(observation.token_ids) - len(observation.emitted_token_ids)
        row_tokens = (observation.token_ids[num_before - 1], *observation.tree.token_ids)
        path = observation.path
        others = set(range(len(row_tokens))).difference(path)
        for row in (*sorted(others), *path):
            successors = tuple(top_token_ids[row][: self.num_top_tokens])
            if successors:
                self._matrix.put(row_tokens[row], successors)

    def propose(self, request: DraftRequest) -> DraftTree:
        self._read_rest()
        root, shape = (request.token_ids[-1], 0), request.shape
        if shape.width == 1:
            return grow_chain(request.depth, root, self._children, _advance)
        nodes = self._template.within(shape)
        return grow(nodes, request.max_nodes, root, self._children, _advance)

    def successors(self, token_id: int) -> Sequence[int]:
        """Returns what may follow a token, likeliest first; empty where nothing is known."""
        row = self._matrix.get(token_id) or self._prompt.get(token_id) or ()
        return row[: self.num_top_tokens]

    def _children(self, state: tuple[int, int]) -> Children:
        token_id, depth = state
        successors = self.successors(token_id)
        return Children(successors, _FEATURES[min(depth, _NUM_DEPTHS - 1)])


def _advance(state: tuple[int, int], token_id: int) -> tuple[int, int]:
    return token_id, state[1] + 1
