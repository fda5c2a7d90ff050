"""``suffix``: copies from wherever the text's ending was seen, and finds its way back after edits.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975): candidates are the places in the request's
own text, and in the same tenant's finished requests, whose contexts agree with the last tokens;
chains and trees take the likeliest nodes. Beyond it, the drafter remembers where copying broke
off, so that after an insertion, a replacement or a deletion it goes on there on a match of one
token or none; and what places are worth is fitted, not counted (``drafters/copying/weights.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafters.base import DrafterInfo, DrafterOption, DraftRequest, Observation, OptionValue
from drafters.copying.alignment import FEW_CANDIDATES, MAX_CANDIDATES, Alignment
from drafters.copying.history import Histories, TenantHistory
from drafters.copying.suffix_draft import (
    CHAIN_CORRECTION,
    TREE_CORRECTION,
    DraftBuilder,
    chain_of_one,
    copied,
)
from drafters.copying.weights import NOTHING_COPYING, NOTHING_LOST
from drafters.tree import EMPTY, DraftTree

INFO = DrafterInfo(
    name="suffix",
    description=(
        "Copies what followed earlier occurrences of the last tokens, in the request or in the "
        "tenant's finished requests, as a chain or a tree of the likeliest; after an edit it goes on "
        "where copying broke off. Best where the output repeats what was seen (edits, agents, code)."
    ),
    drafts_trees=True,
    options=(
        DrafterOption(
            "use_history",
            True,
            "Draft also from the tenant's finished requests, and keep this one for later ones.",
        ),
    ),
    cost="Per step and request some 6 microseconds while copying, 40 to 80 in between.",
)


class SuffixDrafter:
    """See the module and ``Drafter``. State: an ``Alignment`` per request, bounded, and a bounded
    ``TenantHistory`` per cache_salt."""

    def __init__(self) -> None:
        self.info = INFO
        self._states: dict[str, SuffixState] = {}
        self._histories = Histories()

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        cache_salt: str,
    ) -> None:
        """Raises ValueError for options that do not fit and for a request that is already open."""
        if request_id in self._states:
            raise ValueError(f"request {request_id!r} is already open")
        wanted = self.info.resolve(options)
        history = self._histories.of(cache_salt) if wanted["use_history"] else None
        self._states[request_id] = SuffixState(token_ids, history)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        self._histories.advance()
        return [self._states[request.request_id].propose(request) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for observation in observations:
            self._states[observation.request_id].observe(observation)

    def num_top_tokens(self, request_id: str) -> int:
        """None. Raises KeyError for a request that is not open."""
        _ = self._states[request_id]
        return 0

    def close(self, request_id: str) -> None:
        """Hand the text to the tenant's history and forget the request."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.finish()


class SuffixState:
    """One request: what it copies from, and its drafts."""

    def __init__(self, token_ids: Sequence[int], history: TenantHistory | None) -> None:
        self._history = history
        self._alignment = Alignment(token_ids, history)

    def observe(self, observation: Observation) -> None:
        self._alignment.extend(observation.token_ids)

    def finish(self) -> None:
        if self._history is not None:
            self._history.add(self._alignment.token_ids)

    def size(self) -> int:
        """Contexts held."""
        return self._alignment.size()

    def propose(self, request: DraftRequest) -> DraftTree:
        alignment, shape = self._alignment, request.shape
        alignment.extend(request.token_ids)
        depth = min(request.max_nodes, shape.depth)
        if depth < 1:
            return EMPTY
        is_chain = shape.width == 1 or request.max_nodes == 1
        if alignment.is_settled and (is_chain or depth == request.max_nodes):
            min_share = CHAIN_CORRECTION if is_chain else TREE_CORRECTION
            # In the midst of a long copy only what it got wrong before is worth a node.
            assert alignment.source is not None
            run = copied(
                alignment.source, alignment.position, depth, alignment.source is alignment.token_ids
            )
            if not alignment.corrections.any_in(alignment.token_ids[-1], run, min_share):
                return chain_of_one(run, alignment.length)
            candidates = [alignment.current()]
        else:
            candidates = alignment.candidates(FEW_CANDIDATES if is_chain else MAX_CANDIDATES)
        is_copying = alignment.num_lost_tokens == 0 and alignment.has_copied
        nothing = NOTHING_COPYING if is_copying else NOTHING_LOST
        builder = DraftBuilder(alignment, candidates, nothing, depth)
        return builder.chain() if is_chain else builder.tree(request.max_nodes, shape.width)
