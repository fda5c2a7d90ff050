"""No draft carries another tenant's tokens: for every drafter that needs no model, those that share
within a tenant sharing as much as they can. With models: ``tests/engine/test_tenants_served.py``."""

from __future__ import annotations

from itertools import count

import pytest

from drafters.base import Drafter, DraftRequest, DraftShape, Observation
from drafters.copying.suffix_index import MAX_TENANTS as MAX_HISTORIES
from drafters.registry import build_drafters
from drafters.tables.sharing import MAX_TENANTS as MAX_TABLES
from drafters.tree import DraftTree

pytestmark = pytest.mark.slow

FREE = tuple(build_drafters())
ALPHABET = 12
SEED = [0, 1, 2, 3, 4, 5]
"""All tenants' texts begin alike, so that contexts agree; what follows is their own."""
REMEMBERS = {"suffix", "stand", "recycling", "auto"}
_ids = count()


def own(tenant: int) -> range:
    """The tokens that only this tenant's texts have."""
    return range(100 + tenant * ALPHABET, 100 + (tenant + 1) * ALPHABET)


def serve(drafter: Drafter, tenant: int, cache_salt: str | None = None) -> set[int]:
    """A request from open to close, with a chain and a tree at every step; the tokens drafted."""
    name = f"r{next(_ids)}"
    tokens = own(tenant)
    options = {option.name: True for option in drafter.info.options if option.name == "share"}
    text = list(SEED)
    drafter.open(name, text, options, f"tenant {tenant}" if cache_salt is None else cache_salt)
    if drafter.info.takes_prediction:
        drafter.predict(name, [*SEED, *tokens])
    drafted = set[int]()
    for step in range(18):
        for shape in (DraftShape(1, 8), DraftShape(4, 8)):
            (tree,) = drafter.propose([DraftRequest(name, text, 24, shape)])
            drafted.update(tree.token_ids)
        # The start comes back now and then, so that it is followed by the tenant's own again.
        token = SEED[step % 9] if step % 9 < len(SEED) - 1 else tokens[step % ALPHABET]
        text.append(token)
        observe(drafter, name, text, tree, token, tokens)
    drafter.close(name)
    return drafted


def observe(
    drafter: Drafter, name: str, text: list[int], tree: DraftTree, token: int, tokens: range
) -> None:
    num_rows = len(tree) + 1
    wanted = drafter.num_top_tokens(name)
    tops = [token, *(other for other in tokens if other != token)][:wanted]
    probs = [0.5 / (1 + rank) for rank in range(len(tops))]
    row_tokens = [token] * num_rows
    rows = (row_tokens, [0], [token], [tops] * num_rows, [probs] * num_rows)
    drafter.observe([Observation(name, text, tree, *rows)])


@pytest.mark.parametrize("name", sorted(REMEMBERS))
def test_under_one_salt_it_would(name: str) -> None:
    drafter = build_drafters([name])[name]
    serve(drafter, 0, cache_salt="both")
    assert serve(drafter, 1, cache_salt="both") & set(own(0))


@pytest.mark.parametrize("name", FREE)
def test_no_draft_carries_another_tenants_tokens(name: str) -> None:
    """Nor once more tenants came than are remembered: the first is forgotten, the last is not."""
    drafter = build_drafters([name])[name]
    num_tenants = max(MAX_HISTORIES, MAX_TABLES) + 3
    for tenant in (0, *range(num_tenants), 0, num_tenants - 1):
        drafted = serve(drafter, tenant)
        assert drafted <= {*SEED, *own(tenant)}, "another tenant's tokens"
        assert bool(drafted) == (name not in ("none", "grammar"))
