"""The options of speculation, said once: names, defaults, ranges and words.

``SpeculativeParams`` is the one type for them, from JSON to the gamma policies. Made from its fields:
the ``speculative`` object of a request and the server's defaults for it, what ``GET /v1/drafters``
says of them (and so the playground's form), the terminal client's flags, the table in docs/api.md, and
``SpeculativeConfig``. The module imports nothing of the project, so that a client without an engine
has the same words.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

TreeStrategy = Literal["auto", "none", "linear", "tree"]
VerificationName = Literal["match", "rejection", "block"]

NO_DRAFTER = "none"
USUAL_DRAFTERS = ("auto", "ngram")
"""The default of servers that offer it, the first first."""
FIXED_POLICY = "fixed"
"""The policy that takes no bounds: gamma is ``num_speculative_tokens``."""


def described(default: Any, description: str, **more: Any) -> Any:
    """Returns a dataclass's field with what is to be said of it. ``more``: bounds (ge, gt, le, lt,
    max_length), ``choices`` (what each value means), ``flag`` (the terminal client's name for it).
    """
    named = {name: more.pop(name, None) for name in ("choices", "flag")}
    about = {"description": description, "bounds": more} | named
    # A dataclass takes no mutable default, and a mapping here is always the empty one.
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of a request's drafts: ``width`` 1 is a chain; ``depth`` bounds the longest path."""

    width: int = 1
    depth: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParams:
    """Speculation of one request, under the names that users write: drafter, depth, shape.

    In a request that is resolved, ``adaptive_depth`` is the name of a gamma policy
    (``engine.speculation.gamma``), the fields agree with each other, and ``options`` are complete.
    """

    draft_strategy: str = described(
        USUAL_DRAFTERS[0],
        "The drafter; GET /v1/drafters lists them, none is plain decoding.",
        max_length=64,
    )
    num_speculative_tokens: int = described(
        8,
        "Under fixed: gamma, the drafts in every step; 0 is plain decoding. Adaptive policies: the "
        "most in a request's first draft, and under those that weigh cost, as goodput, the most in any "
        "where max_speculative_tokens is not given.",
        flag="gamma",
        ge=0,
    )
    adaptive_depth: str = described(
        "goodput",
        "What sets gamma: a policy, as fixed or goodput; true is the server's adaptive one, false "
        "is fixed.",
        flag="policy",
    )
    min_speculative_tokens: int = described(
        0, "Adaptive policies: never fewer drafts in a step.", ge=0
    )
    max_speculative_tokens: int = described(
        16, "Adaptive policies: never more drafts in a step.", flag="max-gamma", ge=0
    )
    target_acceptance_rate: float | None = described(
        None,
        "target_rate: what gamma is steered to (default 0.7). goodput: grant no more than "
        "is expected to be accepted at this rate.",
        gt=0,
        lt=1,
    )
    tree_strategy: TreeStrategy = described(
        "auto",
        "Shape of the drafts; none and linear are a chain.",
        flag="tree",
        choices={
            "auto": "as many continuations as pay: what is verified is chosen node by node",
            "none": "one continuation",
            "linear": "one continuation",
            "tree": "several continuations",
        },
    )
    tree_width: int = described(2, "Children per node of a tree.", ge=1)
    tree_depth: int = described(6, "Longest path of a tree.", ge=1)
    verification: VerificationName = described(
        "match",
        "match: emit what the target alone would have, token for token. rejection, and block for "
        "chains: its distribution, for drafters that draw.",
        flag="verification",
        choices={
            "match": "the same text as without drafts",
            "rejection": "the same distribution, not the same text",
            "block": "as rejection, drafts judged together; chains only",
        },
    )
    options: Mapping[str, bool | int | float | str] = described(
        {}, "The drafter's own options, as GET /v1/drafters lists them."
    )
    return_drafted: bool = described(False, "Tell with each token whether it was drafted.")

    @property
    def shape(self) -> DraftShape:
        """The shape of each draft: a chain has width 1. Where the engine decides, that of its chains."""
        if self.tree_strategy == "tree":
            return DraftShape(self.tree_width, self.tree_depth)
        return DraftShape(1, max(1, self.max_speculative_tokens))


PLAIN = SpeculativeParams(
    draft_strategy=NO_DRAFTER,
    adaptive_depth=FIXED_POLICY,
    num_speculative_tokens=0,
    max_speculative_tokens=0,
)
"""Plain decoding."""


def about(name: str) -> Mapping[str, Any]:
    """Returns the metadata of a field, as ``described`` made it."""
    return next(each.metadata for each in fields(SpeculativeParams) if each.name == name)


_CHECKS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "must be at least"),
    "gt": (operator.gt, "must be above"),
    "le": (operator.le, "must be at most"),
    "lt": (operator.lt, "must be below"),
}


def check_ranges(kind: type, given: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first of the given fields of ``kind`` that is out of its range."""
    for each in fields(kind):
        value, choices = given.get(each.name), each.metadata.get("choices")
        if value is None:
            continue
        if choices and value not in choices:
            raise ValueError(f"{each.name} must be one of: {', '.join(choices)}")
        for name, bound in each.metadata.get("bounds", {}).items():
            if name in _CHECKS and not _CHECKS[name][0](value, bound):
                limit = f"{_CHECKS[name][1]} {bound:g}"
                wrong = "must not be negative" if limit == "must be at least 0" else limit
                raise ValueError(f"{each.name} {wrong}")
