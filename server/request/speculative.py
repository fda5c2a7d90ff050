"""The ``speculative`` object: who drafts, how deep, in what shape; for a request, or as the
server's default.

``resolve`` overlays a request's object on the server's and checks the outcome against what the
engine has and what the operator allows. A field that could have no effect next to the others is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from drafters.base import DrafterInfo, DraftShape, OptionValue
from engine.info import EngineInfo
from engine.params import GammaPolicyName, SpeculativeParams, VerificationName
from engine.speculation.gamma import gamma_policy_names
from server.errors import ApiError, bad_request
from server.request.wire import Wire

POLICIES = gamma_policy_names()
TREE_STRATEGIES = ("none", "linear", "tree")
VERIFICATIONS: tuple[VerificationName, ...] = ("match", "rejection", "block")
NO_DRAFTER = "none"
PREFERRED_DRAFTER = "ngram"
PREDICTION_DRAFTER = "prediction"

_DEPTH_FIELDS = (
    "num_speculative_tokens",
    "adaptive_depth",
    "min_speculative_tokens",
    "max_speculative_tokens",
    "target_acceptance_rate",
)
_RATE = "target_acceptance_rate"
_TREE_FIELDS = ("tree_strategy", "tree_width", "tree_depth")


def _parse_adaptive(value: object) -> object:
    if value is None or isinstance(value, bool) or value in POLICIES:
        return value
    raise ValueError(f"must be true, false, or one of: {', '.join(POLICIES)}")


def _parse_verification(value: object) -> object:
    if value is None or value in VERIFICATIONS:
        return value
    raise ValueError(f"must be one of: {', '.join(VERIFICATIONS)}")


def _parse_options(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(item, bool | int | float | str)
        for key, item in value.items()
    ):
        raise ValueError("must be an object of booleans, numbers and strings")
    return value


def _either_schema(*kinds: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind} for kind in kinds]})


class SpeculativeField(Wire):
    """Left out: the server's default. ``adaptive_depth`` true is the server's adaptive policy,
    false is "fixed".
    """

    draft_strategy: str | None = Field(
        default=None, max_length=64, description="The drafter; GET /v1/drafters lists them."
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        description="fixed: gamma. Adaptive policies: the most in a request's first draft; "
        "goodput without max_speculative_tokens: the most in any.",
    )
    adaptive_depth: Annotated[
        Any, PlainValidator(_parse_adaptive), _either_schema("boolean", "string", "null")
    ] = Field(default=None, description="true, false, fixed, target_rate or goodput.")
    min_speculative_tokens: int | None = Field(default=None, ge=0, description="adaptive policies")
    max_speculative_tokens: int | None = Field(default=None, ge=0, description="adaptive policies")
    target_acceptance_rate: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="target_rate: what gamma is steered to. goodput: grant no more than is expected "
        "to be accepted at this rate.",
    )
    tree_strategy: Literal["none", "linear", "tree"] | None = Field(
        default=None, description="none and linear draft a chain."
    )
    tree_width: int | None = Field(default=None, ge=1, description="Children per node, for trees.")
    tree_depth: int | None = Field(default=None, ge=1, description="Longest path, for trees.")
    verification: Annotated[
        Any, PlainValidator(_parse_verification), _either_schema("string", "null")
    ] = Field(
        default=None,
        description="match: emit what the target alone would have, token for token. rejection, and "
        "block for chains: its distribution, for drafters that draw.",
    )
    options: Annotated[Any, PlainValidator(_parse_options), _either_schema("object", "null")] = (
        Field(
            default=None, description="The drafter's own options, as GET /v1/drafters lists them."
        )
    )
    return_drafted: bool | None = Field(
        default=None, description="Tell with each token whether it was drafted."
    )

    def given(self) -> set[str]:
        """The names of the fields that hold a value."""
        return {name for name in type(self).model_fields if getattr(self, name) is not None}


class SpeculativeCaps(BaseModel):
    """What the operator allows. The engine's own ``max_num_nodes`` bounds the tokens as well."""

    model_config = ConfigDict(extra="forbid")

    draft_strategies: list[str] | None = Field(
        default=None, description="Drafters that requests may name; default: all that are loaded."
    )
    max_speculative_tokens: int | None = Field(
        default=None, ge=0, description="Most draft nodes per request and step."
    )
    max_tree_width: int = Field(default=8, ge=1, description="Widest draft tree.")
    max_tree_depth: int = Field(default=32, ge=1, description="Deepest draft tree.")


@dataclass(frozen=True, slots=True)
class Defaults:
    """A ``SpeculativeField`` of the server with every gap filled."""

    drafter: str
    policy: GammaPolicyName
    adaptive_policy: GammaPolicyName
    num_draft_tokens: int
    min_draft_tokens: int
    max_draft_tokens: int
    target_acceptance_rate: float | None
    tree: bool
    tree_width: int
    tree_depth: int
    return_drafted: bool
    verification: VerificationName = "match"
    options: Mapping[str, OptionValue] = field(default_factory=dict)


class SpeculativeResolver:
    """Turns ``speculative`` objects into the engine's parameters, for one engine and one
    operator's wishes.

    Raises ValueError where the server's own default does not fit the engine or the caps.
    """

    def __init__(self, info: EngineInfo, default: SpeculativeField, caps: SpeculativeCaps) -> None:
        self._drafters = info.drafters
        self.caps = caps
        self.max_tokens = min(
            info.max_num_nodes,
            info.max_num_nodes
            if caps.max_speculative_tokens is None
            else caps.max_speculative_tokens,
        )
        unknown = sorted(set(caps.draft_strategies or ()) - set(info.drafters))
        if unknown:
            raise ValueError(f"speculative caps name a drafter that is not loaded: {unknown[0]}")
        self.allowed = [
            name
            for name in info.drafters
            if name == NO_DRAFTER or caps.draft_strategies is None or name in caps.draft_strategies
        ]
        self.defaults = self._builtin()
        try:
            params = self.resolve(default)
        except ApiError as error:
            raise ValueError(f"{error.param}: {error.message}") from error
        self.defaults = self._with(default, params)

    def resolve(
        self, asked: SpeculativeField | None, has_prediction: bool = False
    ) -> SpeculativeParams:
        """The parameters of a request. Raises ApiError 400 naming the field at fault."""
        asked = asked or SpeculativeField()
        given = asked.given()
        info = self._drafter(asked, has_prediction)
        options = self._options(info, asked)
        if info.name == NO_DRAFTER:
            for name in (*_DEPTH_FIELDS, *_TREE_FIELDS, "verification"):
                _no_effect_if(name in given, name, f"draft_strategy {NO_DRAFTER!r}")
            return SpeculativeParams(
                drafter=NO_DRAFTER,
                policy="fixed",
                num_draft_tokens=0,
                min_draft_tokens=0,
                max_draft_tokens=0,
            )
        policy = self._policy(asked)
        num_tokens, min_tokens, max_tokens = self._depth(asked, policy)
        shape = self._shape(asked, info, max_tokens)
        return SpeculativeParams(
            drafter=info.name,
            policy=policy,
            num_draft_tokens=num_tokens,
            min_draft_tokens=min_tokens,
            max_draft_tokens=max_tokens,
            target_acceptance_rate=self._rate(asked, policy),
            shape=shape,
            options=options,
            verification=self._verification(asked, info, shape),
        )

    def returns_drafted(self, asked: SpeculativeField | None) -> bool:
        """Whether the reply tells which tokens were drafted."""
        if asked is None or asked.return_drafted is None:
            return self.defaults.return_drafted
        return asked.return_drafted

    def _builtin(self) -> Defaults:
        return Defaults(
            drafter=PREFERRED_DRAFTER if PREFERRED_DRAFTER in self.allowed else NO_DRAFTER,
            policy="goodput",
            adaptive_policy="goodput",
            num_draft_tokens=min(8, self.max_tokens),
            min_draft_tokens=0,
            max_draft_tokens=min(16, self.max_tokens),
            target_acceptance_rate=None,
            tree=False,
            tree_width=min(2, self.caps.max_tree_width),
            tree_depth=min(6, self.caps.max_tree_depth),
            return_drafted=False,
        )

    def _with(self, default: SpeculativeField, params: SpeculativeParams) -> Defaults:
        """The built-in defaults overlaid with the operator's, which ``resolve`` found sound."""
        base = self.defaults
        if params.drafter == NO_DRAFTER:
            # A request may still name a drafter: it then gets the built-in depth.
            num_tokens, min_tokens, max_tokens = (
                base.num_draft_tokens,
                base.min_draft_tokens,
                base.max_draft_tokens,
            )
            policy = base.policy
        else:
            policy = params.policy
            num_tokens, min_tokens = params.num_draft_tokens, params.min_draft_tokens
            max_tokens = base.max_draft_tokens if policy == "fixed" else params.max_draft_tokens
        return Defaults(
            drafter=params.drafter,
            policy=policy,
            adaptive_policy=base.adaptive_policy if policy == "fixed" else policy,
            num_draft_tokens=num_tokens,
            min_draft_tokens=min_tokens,
            max_draft_tokens=max(max_tokens, num_tokens),
            target_acceptance_rate=default.target_acceptance_rate,
            tree=default.tree_strategy == "tree",
            tree_width=default.tree_width or base.tree_width,
            tree_depth=default.tree_depth or base.tree_depth,
            return_drafted=bool(default.return_drafted),
            verification=params.verification,
            options=dict(default.options or {}),
        )

    def _drafter(self, asked: SpeculativeField, has_prediction: bool) -> DrafterInfo:
        name = self.defaults.drafter if asked.draft_strategy is None else asked.draft_strategy
        if name not in self.allowed:
            raise _refuse("draft_strategy", f"must be one of: {', '.join(self.allowed)}")
        if not has_prediction:
            if asked.draft_strategy == PREDICTION_DRAFTER:
                raise _refuse("draft_strategy", f"{PREDICTION_DRAFTER!r} needs a 'prediction'")
            return self._drafters[name]
        takers = [each for each in self.allowed if self._drafters[each].takes_reference]
        if name not in takers and asked.draft_strategy is None and PREDICTION_DRAFTER in takers:
            name = PREDICTION_DRAFTER
        if name not in takers:
            able = (
                f"one of: {', '.join(takers)}" if takers else "one that this server does not offer"
            )
            raise bad_request("prediction", f"prediction needs another draft_strategy: {able}")
        return self._drafters[name]

    def _options(self, info: DrafterInfo, asked: SpeculativeField) -> dict[str, OptionValue]:
        given: dict[str, Any] = asked.options or {}
        # The server's default options belong to its default drafter and to no other.
        inherited = self.defaults.options if info.name == self.defaults.drafter else {}
        try:
            # All at once: whether one fits may hang on another.
            return info.resolve({**inherited, **given})
        except ValueError as error:
            raise _refuse(_first_named(given, str(error)), str(error)) from error

    def _policy(self, asked: SpeculativeField) -> GammaPolicyName:
        policy = self.defaults.policy
        if asked.adaptive_depth is True:
            policy = self.defaults.adaptive_policy
        elif asked.adaptive_depth is False:
            policy = "fixed"
        elif asked.adaptive_depth is not None:
            policy = asked.adaptive_depth
        given = asked.given()
        if policy == "fixed":
            for name in ("min_speculative_tokens", "max_speculative_tokens", _RATE):
                _no_effect_if(name in given, name, "adaptive_depth 'fixed'")
        return policy

    def _rate(self, asked: SpeculativeField, policy: GammaPolicyName) -> float | None:
        if policy == "fixed":
            return None
        if asked.target_acceptance_rate is None:
            return self.defaults.target_acceptance_rate
        return asked.target_acceptance_rate

    def _depth(self, asked: SpeculativeField, policy: GammaPolicyName) -> tuple[int, int, int]:
        """(num, min, max): what was given stands, what was not gives way to it."""
        num, low, high = (
            asked.num_speculative_tokens,
            asked.min_speculative_tokens,
            asked.max_speculative_tokens,
        )
        for name, value in (("num", num), ("min", low), ("max", high)):
            if value is not None and value > self.max_tokens:
                message = f"must be at most {self.max_tokens} on this server"
                raise _refuse(f"{name}_speculative_tokens", message)
        if policy == "fixed":
            fixed = self.defaults.num_draft_tokens if num is None else num
            return fixed, 0, fixed
        if high is None and policy == "goodput":
            high = num
        if low is not None and high is not None and low > high:
            raise _refuse("min_speculative_tokens", "must not exceed max_speculative_tokens")
        if num is not None and low is not None and num < low:
            raise _refuse("num_speculative_tokens", "must not be below min_speculative_tokens")
        if num is not None and high is not None and num > high:
            raise _refuse("num_speculative_tokens", "must not exceed max_speculative_tokens")
        if high is None:
            high = max(self.defaults.max_draft_tokens, num or 0, low or 0)
        if low is None:
            low = min(self.defaults.min_draft_tokens, high if num is None else num)
        if num is None:
            num = min(max(self.defaults.num_draft_tokens, low), high)
        return num, low, high

    def _shape(self, asked: SpeculativeField, info: DrafterInfo, max_tokens: int) -> DraftShape:
        tree = self.defaults.tree if asked.tree_strategy is None else asked.tree_strategy == "tree"
        if asked.tree_strategy is None and asked.verification == "block":
            tree = False
        given = asked.given()
        if tree and not info.drafts_trees:
            if asked.tree_strategy == "tree":
                raise _refuse("tree_strategy", f"drafter {info.name!r} takes no tree shape")
            tree = False
        if not tree:
            for name in ("tree_width", "tree_depth"):
                _no_effect_if(name in given, name, "a tree_strategy other than 'tree'")
            return DraftShape(width=1, depth=max(1, max_tokens))
        for name, cap in (
            ("tree_width", self.caps.max_tree_width),
            ("tree_depth", min(self.caps.max_tree_depth, max(1, max_tokens))),
        ):
            value = getattr(asked, name)
            if value is not None and value > cap:
                raise _refuse(name, f"must be at most {cap} for this request")
        width = asked.tree_width or self.defaults.tree_width
        depth = asked.tree_depth or min(self.defaults.tree_depth, max(1, max_tokens))
        return DraftShape(width=width, depth=depth)

    def _verification(
        self, asked: SpeculativeField, info: DrafterInfo, shape: DraftShape
    ) -> VerificationName:
        """What was given is refused where it cannot be; the server's default gives way."""
        wanted: VerificationName = asked.verification or self.defaults.verification
        possible: VerificationName = wanted
        why = ""
        if wanted != "match" and not info.draws:
            possible = "match"
            why = f"drafter {info.name!r} does not draw from a distribution of its own"
        elif wanted == "block" and shape.width > 1:
            possible, why = "rejection", "'block' is for chains"
        if possible != wanted and asked.verification is not None:
            raise _refuse("verification", f"must be {possible!r} for this request: {why}")
        return possible


def _refuse(name: str, message: str) -> ApiError:
    return bad_request(f"speculative.{name}", f"speculative.{name} {message}")


def _first_named(options: Mapping[str, Any], message: str) -> str:
    """The field of the option that a message names first."""
    found = [(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message), name) for name in options]
    places = [(match.start(), name) for match, name in found if match]
    return f"options.{min(places)[1]}" if places else "options"


def _no_effect_if(condition: bool, name: str, where: str) -> None:
    if condition:
        raise _refuse(name, f"has no effect with {where}; leave one of them out")
