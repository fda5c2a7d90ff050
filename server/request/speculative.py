"""The ``speculative`` object: who drafts, how deep, in what shape; for a request, or as the
server's default.

``resolve`` overlays a request's object on the server's and checks the outcome against what the
engine has and what the operator allows. A field that could have no effect next to the others is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_settings import NoDecode

from drafters.base import DrafterInfo, OptionValue
from engine.info import EngineInfo
from engine.params import SpeculativeParams
from engine.speculation.gamma import gamma_policy_names
from engine.speculation.gamma.policy import policy_info
from server.errors import ApiError, bad_request
from server.request.body import Body, described_by
from slipstream.options import (
    FIXED_POLICY,
    INSIDE,
    NO_DRAFTER,
    SpeculativeOptions,
    VerificationName,
    about,
)

PREDICTION_DRAFTER = "prediction"
_BUILTIN = SpeculativeOptions()
_NUM, _LOW, _HIGH = (f"{which}_speculative_tokens" for which in ("num", "min", "max"))
_RATE = "target_acceptance_rate"
_WITHOUT_A_DRAFTER = ("draft_strategy", "options", "return_drafted")


def fields_read_by(policy: str) -> list[str]:
    """Those that have an effect under a policy."""
    settings = policy_info(policy).settings
    return [public for public, name in INSIDE.items() if name in settings]


def _parse_adaptive(value: object) -> object:
    if isinstance(value, bool) or value in gamma_policy_names():
        return value
    raise ValueError(f"must be true, false, or one of: {', '.join(gamma_policy_names())}")


def _parse_verification(value: object) -> object:
    known = about("verification")["choices"]
    if isinstance(value, str) and value in known:
        return value
    raise ValueError(f"must be one of: {', '.join(known)}")


def _parse_options(value: object) -> object:
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(item, bool | int | float | str)
        for key, item in value.items()
    ):
        raise ValueError("must be an object of booleans, numbers and strings")
    return value


_TYPES = {
    "adaptive_depth": Annotated[
        Any,
        PlainValidator(_parse_adaptive),
        WithJsonSchema({"enum": [True, False, *gamma_policy_names()]}),
    ],
    "verification": Annotated[
        Any,
        PlainValidator(_parse_verification),
        WithJsonSchema({"type": "string", "enum": list(about("verification")["choices"])}),
    ],
    "options": Annotated[
        Any,
        PlainValidator(_parse_options, json_schema_input_type=dict[str, bool | int | float | str]),
    ],
}


@described_by(SpeculativeOptions, _TYPES, optional=True)
class SpeculativeField(Body):
    """Left out: the server's default. ``adaptive_depth`` true is the server's adaptive policy,
    false is "fixed".
    """

    def given(self) -> dict[str, Any]:
        """The fields that hold a value."""
        return {name: value for name, value in self if value is not None}


def _split(value: object) -> object:
    """Names apart by spaces or commas, or a list in JSON."""
    return re.findall(r"[^\s,\[\]\"']+", value) if isinstance(value, str) else value


Names = Annotated[list[str] | None, NoDecode, BeforeValidator(_split)]


class SpeculativeCaps(BaseModel):
    """What the operator allows. The engine's own ``max_num_nodes`` bounds the tokens as well."""

    model_config = ConfigDict(extra="forbid")

    draft_strategies: Names = Field(
        default=None, description="Drafters that requests may name; default: all that are loaded."
    )
    max_speculative_tokens: int | None = Field(
        default=None, ge=0, description="Most draft nodes per request and step."
    )
    max_tree_width: int = Field(default=8, ge=1, description="Widest draft tree.")
    max_tree_depth: int = Field(default=32, ge=1, description="Deepest draft tree.")


class UnfitSpeculationError(ValueError):
    """An operator's wish that the engine or the caps rule out. ``group``: "speculative" or
    "speculative_caps"; ``name``: the field in it; ``reason``: without its name."""

    def __init__(self, message: str, group: str, name: str, reason: str) -> None:
        super().__init__(message)
        self.group = group
        self.name = name
        self.reason = reason


class SpeculativeResolver:
    """Turns ``speculative`` objects into the engine's parameters, for one engine and one
    operator's wishes.

    ``defaults``: what a request that says nothing gets; ``wished``: what the operator said of it.
    Raises UnfitSpeculationError where the server's own default does not fit the engine or the caps.
    """

    def __init__(self, info: EngineInfo, default: SpeculativeField, caps: SpeculativeCaps) -> None:
        self.info = info
        self._drafters = info.drafters
        self.caps = caps
        self.wished = default.given()
        cap = caps.max_speculative_tokens
        self.max_tokens = info.max_num_nodes if cap is None else min(info.max_num_nodes, cap)
        unknown = sorted(set(caps.draft_strategies or ()) - set(info.drafters))
        if unknown:
            reason = f"name a drafter that is not loaded: {unknown[0]}"
            message = f"speculative caps {reason}"
            raise UnfitSpeculationError(message, "speculative_caps", "draft_strategies", reason)
        self.allowed = [
            name
            for name in info.drafters
            if name == NO_DRAFTER or caps.draft_strategies is None or name in caps.draft_strategies
        ]
        preferred = _BUILTIN.draft_strategy
        self.defaults = replace(
            _BUILTIN,
            draft_strategy=preferred if preferred in self.allowed else NO_DRAFTER,
            num_speculative_tokens=min(_BUILTIN.num_speculative_tokens, self.max_tokens),
            max_speculative_tokens=min(_BUILTIN.max_speculative_tokens, self.max_tokens),
            tree_width=min(_BUILTIN.tree_width, caps.max_tree_width),
            tree_depth=min(_BUILTIN.tree_depth, caps.max_tree_depth),
        )
        self._adaptive_policy = self.defaults.adaptive_depth
        try:
            self._overlay(self.wished)
        except ApiError as error:
            group, _, name = (error.param or "").partition(".")
            reason = error.message.removeprefix(f"{error.param} ")
            message = f"{error.param}: {error.message}"
            raise UnfitSpeculationError(message, group, name, reason) from error

    def held_to(self, drafters: Sequence[str] | None) -> SpeculativeResolver:
        """For requests that may have these drafters only, and plain decoding; None: this one. Where the
        default is none of them the first that can be takes its place, with nothing that was wished for
        the other."""
        if drafters is None:
            return self
        allowed = [name for name in drafters if name in self.allowed]
        wished = self.wished
        if self.defaults.draft_strategy not in (NO_DRAFTER, *allowed):
            # What needs more of a request than that it asks for nothing is no default.
            able = (name for name in allowed if name != PREDICTION_DRAFTER)
            wished = {"draft_strategy": next(able, NO_DRAFTER)}
        caps = self.caps.model_copy(update={"draft_strategies": allowed})
        return SpeculativeResolver(self.info, SpeculativeField(**wished), caps)

    def resolve(
        self, asked: SpeculativeField | None, has_prediction: bool = False
    ) -> SpeculativeParams:
        """The parameters of a request. Raises ApiError 400 naming the field at fault."""
        given = {} if asked is None else asked.given()
        return SpeculativeParams.from_options(self._options(given, has_prediction))

    def returns_drafted(self, asked: SpeculativeField | None) -> bool:
        """Whether the reply tells which tokens were drafted."""
        given = {} if asked is None else asked.given()
        return bool(given.get("return_drafted", self.defaults.return_drafted))

    def _options(
        self, given: Mapping[str, Any], has_prediction: bool = False
    ) -> SpeculativeOptions:
        """Every option, by the request or the server, and all of them in agreement."""
        info = self._drafter(given.get("draft_strategy"), has_prediction)
        own = self._drafter_options(info, given.get("options", {}))
        if info.name == NO_DRAFTER:
            for each in fields(SpeculativeOptions):
                if each.name in given and each.name not in _WITHOUT_A_DRAFTER:
                    raise _no_effect(each.name, f"draft_strategy {NO_DRAFTER!r}")
            return SpeculativeOptions(
                draft_strategy=NO_DRAFTER,
                adaptive_depth=FIXED_POLICY,
                num_speculative_tokens=0,
                min_speculative_tokens=0,
                max_speculative_tokens=0,
            )
        policy = self._policy(given)
        num, low, high = self._depth(given, policy)
        shape = self._shape(given, info, high)
        return replace(
            self.defaults,
            draft_strategy=info.name,
            adaptive_depth=policy,
            num_speculative_tokens=num,
            min_speculative_tokens=low,
            max_speculative_tokens=high,
            target_acceptance_rate=(
                given.get(_RATE, self.defaults.target_acceptance_rate)
                if _RATE in fields_read_by(policy)
                else None
            ),
            verification=self._verification(given, info, is_wide=shape.get("tree_width", 1) > 1),
            options=own,
            **shape,
        )

    def _overlay(self, default: Mapping[str, Any]) -> None:
        """Overlay the built-in defaults with the operator's, where those are sound."""
        found = self._options(default)
        # What is not the operator's word is the built-in one, not what it had to give way to. With no
        # drafter, a request may still name one: it then gets the built-in depth.
        changes = dict(default) | {"draft_strategy": found.draft_strategy}
        changes.pop("adaptive_depth", None)
        if found.draft_strategy != NO_DRAFTER:
            policy, num = found.adaptive_depth, found.num_speculative_tokens
            is_bounded = _HIGH in fields_read_by(policy)
            high = (found if is_bounded else self.defaults).max_speculative_tokens
            changes |= {
                "adaptive_depth": policy,
                _NUM: num,
                _LOW: found.min_speculative_tokens,
                _HIGH: max(high, num),
                "tree_strategy": found.tree_strategy,
                "verification": found.verification,
            }
            self._adaptive_policy = policy if is_bounded else self._adaptive_policy
        self.defaults = replace(self.defaults, **changes)

    def _drafter(self, asked: str | None, has_prediction: bool) -> DrafterInfo:
        name = self.defaults.draft_strategy if asked is None else asked
        if name not in self.allowed:
            raise _refuse("draft_strategy", f"must be one of: {', '.join(self.allowed)}")
        if not has_prediction:
            if asked == PREDICTION_DRAFTER:
                raise _refuse("draft_strategy", f"{PREDICTION_DRAFTER!r} needs a 'prediction'")
            return self._drafters[name]
        takers = [each for each in self.allowed if self._drafters[each].takes_prediction]
        if name not in takers and asked is None and PREDICTION_DRAFTER in takers:
            name = PREDICTION_DRAFTER
        if name not in takers:
            able = (
                f"one of: {', '.join(takers)}" if takers else "one that this server does not offer"
            )
            raise bad_request("prediction", f"prediction needs another draft_strategy: {able}")
        return self._drafters[name]

    def _drafter_options(
        self, info: DrafterInfo, given: Mapping[str, Any]
    ) -> dict[str, OptionValue]:
        # The server's default options belong to its default drafter and to no other.
        is_default = info.name == self.defaults.draft_strategy
        inherited = self.defaults.options if is_default else {}
        try:
            # All at once: whether one fits may hang on another.
            return info.resolve({**inherited, **given})
        except ValueError as error:
            raise _refuse(_first_named(given, str(error)), str(error)) from error

    def _policy(self, given: Mapping[str, Any]) -> str:
        asked = given.get("adaptive_depth", self.defaults.adaptive_depth)
        policy: str = {True: self._adaptive_policy, False: FIXED_POLICY}.get(asked, asked)
        for name in (_NUM, _LOW, _HIGH, _RATE):
            if name in given and name not in fields_read_by(policy):
                raise _no_effect(name, f"adaptive_depth {policy!r}")
        return policy

    def _depth(self, given: Mapping[str, Any], policy: str) -> tuple[int, int, int]:
        """(num, min, max): what was given stands, what was not gives way to it."""
        for name in (_NUM, _LOW, _HIGH):
            if given.get(name, 0) > self.max_tokens:
                raise _refuse(name, f"must be at most {self.max_tokens} on this server")
        num, low, high = given.get(_NUM), given.get(_LOW), given.get(_HIGH)
        if _HIGH not in fields_read_by(policy):
            fixed = self.defaults.num_speculative_tokens if num is None else num
            return fixed, 0, fixed
        if high is None and policy_info(policy).weighs_cost:
            high = num
        if low is not None and high is not None and low > high:
            raise _refuse(_LOW, f"must not exceed {_HIGH}")
        if num is not None and low is not None and num < low:
            raise _refuse(_NUM, f"must not be below {_LOW}")
        if num is not None and high is not None and num > high:
            raise _refuse(_NUM, f"must not exceed {_HIGH}")
        if high is None:
            high = max(self.defaults.max_speculative_tokens, num or 0, low or 0)
        if low is None:
            low = min(self.defaults.min_speculative_tokens, high if num is None else num)
        if num is None:
            num = min(max(self.defaults.num_speculative_tokens, low), high)
        return num, low, high

    def _shape(self, given: Mapping[str, Any], info: DrafterInfo, high: int) -> dict[str, Any]:
        """The options of the draft's shape, where they differ from the server's."""
        strategy = given.get("tree_strategy")
        is_tree = (strategy or self.defaults.tree_strategy) == "tree"
        if strategy is None and given.get("verification") == "block":
            is_tree = False
        if is_tree and not info.drafts_trees:
            if strategy == "tree":
                raise _refuse("tree_strategy", f"drafter {info.name!r} takes no tree shape")
            is_tree = False
        longest = max(1, high)
        if not is_tree:
            for name in ("tree_width", "tree_depth"):
                if name in given:
                    raise _no_effect(name, "a tree_strategy other than 'tree'")
            return {"tree_strategy": "linear"}
        for name, cap in (
            ("tree_width", self.caps.max_tree_width),
            ("tree_depth", min(self.caps.max_tree_depth, longest)),
        ):
            if given.get(name, 0) > cap:
                raise _refuse(name, f"must be at most {cap} for this request")
        return {
            "tree_strategy": "tree",
            "tree_width": given.get("tree_width", self.defaults.tree_width),
            "tree_depth": given.get("tree_depth", min(self.defaults.tree_depth, longest)),
        }

    def _verification(
        self, given: Mapping[str, Any], info: DrafterInfo, is_wide: bool
    ) -> VerificationName:
        """What was given is refused where it cannot be; the server's default gives way."""
        wanted: VerificationName = given.get("verification", self.defaults.verification)
        possible: VerificationName = wanted
        why = ""
        if wanted != "match" and not info.samples:
            possible = "match"
            why = f"drafter {info.name!r} does not draw from a distribution of its own"
        elif wanted == "block" and is_wide:
            possible, why = "rejection", "'block' is for chains"
        if possible != wanted and "verification" in given:
            raise _refuse("verification", f"must be {possible!r} for this request: {why}")
        return possible


def _refuse(name: str, message: str) -> ApiError:
    return bad_request(f"speculative.{name}", f"speculative.{name} {message}")


def _no_effect(name: str, where: str) -> ApiError:
    return _refuse(name, f"has no effect with {where}; leave one of them out")


def _first_named(options: Mapping[str, Any], message: str) -> str:
    """The field of the option that a message names first."""
    found = [(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message), name) for name in options]
    places = [(match.start(), name) for match, name in found if match]
    return f"options.{min(places)[1]}" if places else "options"
