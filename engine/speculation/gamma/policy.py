"""The interface of gamma policies, the register of them, and their turns in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from drafters.tree import DraftTree
from engine.request.params import SpeculativeParams
from engine.request.stats import Reason


@dataclass(slots=True)
class DraftCandidate:
    """One decoding request's proposal; the tree may be empty.

    ``survivals[i]``: estimated probability that node i and all its ancestors are accepted.
    ``max_nodes``: what tokens left and model length allow. ``all_or_nothing``: the drafter's rows are
    of use only together (``DrafterNeeds``), and ``gain`` is what such drafts have brought, in tokens.
    ``is_first``: no draft of the request was verified yet.
    """

    request_id: str
    params: SpeculativeParams
    tree: DraftTree
    survivals: Sequence[float]
    max_nodes: int
    all_or_nothing: bool = False
    gain: float = 0.0
    is_first: bool = False


class Grant(NamedTuple):
    """The nodes to verify: ascending indices into the candidate's tree, closed under parents."""

    nodes: Sequence[int]
    reason: Reason

    @property
    def gamma(self) -> int:
        return len(self.nodes)


class Load(NamedTuple):
    """The step as it stands before a policy's turn: what runs whatever the policy grants.

    ``expected_tokens``: one per sampling request plus the survivals of nodes granted so far.
    ``num_rows`` counts those nodes too. ``num_kv_tokens`` is the context of the step's
    ``num_requests`` requests, prompts included. ``draft_seconds`` has been spent on drafting already;
    ``prompt_seconds`` of the step are its prompts', which are read with drafts or without.
    """

    num_rows: int
    num_spare_rows: int
    num_sampling_requests: int
    expected_tokens: float
    num_kv_tokens: int
    num_requests: int
    draft_seconds: float = 0.0
    prompt_seconds: float = 0.0

    @property
    def other_seconds(self) -> float:
        """Seconds to add to a step's time where drafts are weighed."""
        return self.draft_seconds - self.prompt_seconds

    def with_nodes(self, num_nodes: int, gain: float) -> Load:
        """The load with so many more draft nodes, of which ``gain`` are expected to be accepted."""
        return self._replace(
            num_rows=self.num_rows + num_nodes,
            num_spare_rows=self.num_spare_rows - num_nodes,
            expected_tokens=self.expected_tokens + gain,
        )


class StepCost(Protocol):
    """The part of the cost model that policies use; all seconds, never falling in rows."""

    def step_seconds_table(
        self, num_rows: int, num_extra: int, num_kv_tokens: int, num_requests: int
    ) -> Sequence[float]: ...


class GammaPolicy(ABC):
    """Grants for all its requests of a step together; keeps what it must know of each.

    A policy that says no more than ``num_to_propose`` grants so many of the drafter's first nodes.
    ``gamma_policy`` sets the first four of its facts.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]
    """The fields of ``SpeculativeParams`` that it reads; no request may set the others."""
    weighs_cost: ClassVar[bool]
    """It grants by what rows cost, so that others' grants are facts to it, and drafters of its requests
    should weigh their own time, too."""
    bound: ClassVar[Reason] = "policy"
    """The reason that is given where the policy's own gamma limits a grant."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    @abstractmethod
    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        """Returns how many nodes the drafter should offer in the coming step; 0: do not ask it."""

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        """A grant per candidate, in order; together at most ``load.num_spare_rows`` nodes."""
        num_spare = load.num_spare_rows
        grants = []
        for candidate in candidates:
            gamma = self.num_to_propose(candidate.request_id, candidate.params)
            grants.append(_first_nodes(candidate, gamma, num_spare, self.bound))
            num_spare -= grants[-1].gamma
        return grants

    def row_prices(
        self,
        load: Load,  # noqa: ARG002
        num_nodes: int,  # noqa: ARG002
        stride: int = 1,  # noqa: ARG002
        first_only: bool = False,  # noqa: ARG002
    ) -> Sequence[float]:
        """Returns the survivals up to which it grants no node, of up to ``num_nodes`` that it is offered
        under such a load, beside 0, ``stride``, 2 ``stride`` .. others, but for requests that bound it
        otherwise; nothing: it grants any. ``first_only``: beside none, in a third of the time."""
        return ()

    # A policy that learns nothing keeps nothing.

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:  # noqa: B027
        """Learn how the request's grant of this step fared."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """The request is over."""


_POLICIES: dict[str, type[GammaPolicy]] = {}
_Kind = TypeVar("_Kind", bound=type[GammaPolicy])


def gamma_policy(
    name: str, description: str, settings: Sequence[str], weighs_cost: bool = False
) -> Callable[[_Kind], _Kind]:
    """Registers a policy under the name that requests use. ``settings``: the fields of
    ``SpeculativeParams`` that it reads. Raises ValueError if the name is taken or a field unknown."""
    unknown = set(settings) - SpeculativeParams.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"gamma policy {name!r} reads {sorted(unknown)}, which no request has")

    def register(kind: _Kind) -> _Kind:
        if name in _POLICIES:
            raise ValueError(f"there are two gamma policies named {name!r}")
        kind.name, kind.description, kind.settings = name, description, tuple(settings)
        kind.weighs_cost = weighs_cost
        _POLICIES[name] = kind
        return kind

    return register


def policy_info(name: str) -> type[GammaPolicy]:
    """Raises KeyError for a name that nothing has."""
    return _POLICIES[name]


def registered_policies() -> list[type[GammaPolicy]]:
    """Returns the classes by name, those that weigh cost last."""
    return sorted(_POLICIES.values(), key=lambda kind: (kind.weighs_cost, kind.name))


def grant_all(
    policies: Mapping[str, GammaPolicy], candidates: Sequence[DraftCandidate], load: Load
) -> list[Grant]:
    """A grant for every candidate, in order; give them oldest first: the older wins a tie.

    Each of ``policies``, by name, has its turn, and what it grants is base load for the next: those that
    weigh cost are the last, since to them the others' rows are facts.
    """
    granted: dict[int, Grant] = {}
    for name, policy in policies.items():
        places = [i for i, each in enumerate(candidates) if each.params.adaptive_depth == name]
        if not places:
            continue
        granted |= zip(places, policy.grant([candidates[i] for i in places], load), strict=True)
        num_nodes = sum(granted[i].gamma for i in places)
        gain = sum(candidates[i].survivals[node] for i in places for node in granted[i].nodes)
        load = load.with_nodes(num_nodes, gain)
    return [granted[i] for i in range(len(candidates))]


def _first_nodes(candidate: DraftCandidate, gamma: int, num_spare: int, bound: Reason) -> Grant:
    """Grants the first nodes in the drafter's order (parents come first, the likeliest chain leads).

    ``bound`` names what it means when ``gamma`` is what limits the grant.
    """
    num_offered = len(candidate.tree)
    kept = min(num_offered, gamma, candidate.max_nodes, num_spare)
    if kept == num_offered:
        reason = "" if kept else why_nothing_offered(candidate, gamma, bound)
    elif kept == gamma:
        reason = bound
    else:
        reason = "client_cap" if kept == candidate.max_nodes else "overload"
    return Grant(range(0 if candidate.all_or_nothing and kept < num_offered else kept), reason)


def why_nothing_offered(candidate: DraftCandidate, gamma: int, bound: Reason) -> Reason:
    """Returns why a tree is empty: no nodes were asked for, there was no room, or nothing matched."""
    if gamma <= 0:
        return bound
    return "client_cap" if candidate.max_nodes <= 0 else "no_match"
