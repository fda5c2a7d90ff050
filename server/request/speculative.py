"""The ``speculative`` object: who drafts, how deep, in what shape; for a request, or as the
server's default, which an operator may change while the server serves.

``SpeculativeResolver`` overlays a request's object on the server's and checks the outcome against what
the engine has and what the operator allows. A field that could have no effect next to the others is an
error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainValidator

from drafters.base import DrafterInfo, OptionError, OptionValue
from drafters.options import (
    FIXED_POLICY,
    NO_DRAFTER,
    PLAIN,
    USUAL_DRAFTERS,
    SpeculativeParams,
    VerificationName,
)
from engine.request.info import EngineInfo
from engine.speculation.gamma import gamma_policy_names
from engine.speculation.gamma.policy import policy_info
from server.errors import OwnNames, RefusalError
from server.request.body import Body, described_by, integral, optional

PREDICTION_DRAFTER = "prediction"
_BUILT_IN = SpeculativeParams()
_NUM, _LOW, _HIGH = (f"{which}_speculative_tokens" for which in ("num", "min", "max"))
_RATE = "target_acceptance_rate"
_WITHOUT_A_DRAFTER = ("draft_strategy", "options", "return_drafted")


def _parse_adaptive(value: object) -> object:
    if isinstance(value, bool) or value in gamma_policy_names():
        return value
    raise ValueError(f"must be true, false, or one of: {', '.join(gamma_policy_names())}")


def _parse_options(value: object) -> object:
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(item, bool | int | float | str)
        for key, item in value.items()
    ):
        raise ValueError("must be an object of booleans, numbers and strings")
    return {key: integral(item) for key, item in value.items()}


_TYPES = {
    "adaptive_depth": Annotated[
        Any,
        PlainValidator(
            _parse_adaptive, json_schema_input_type=bool | Literal[gamma_policy_names()]
        ),
    ],
    "options": Annotated[
        Any,
        PlainValidator(_parse_options, json_schema_input_type=dict[str, bool | int | float | str]),
    ],
}


@described_by(SpeculativeParams, _TYPES, optional=True)
class SpeculativeField(Body):
    """Left out: the server's default. ``adaptive_depth`` true is the server's adaptive policy,
    false is "fixed".
    """

    def given(self) -> dict[str, Any]:
        """Returns the fields that hold a value."""
        return {name: value for name, value in self if value is not None}


class SpeculativeCaps(Body):
    """The limits of requests. The engine's own ``max_num_nodes`` bounds the tokens as well."""

    draft_strategies: list[str] | None = optional(
        "Drafters that requests may name; default: all that are loaded.", max_length=256
    )
    max_speculative_tokens: int | None = optional("Most draft nodes per request and step.", ge=0)
    max_tree_width: int = optional("Widest draft tree.", default=8, ge=1)
    max_tree_depth: int = optional("Deepest draft tree.", default=32, ge=1)

    def given(self) -> dict[str, Any]:
        """Returns the fields that somebody set."""
        return self.model_dump(exclude_unset=True)


class UnfitSpeculationError(RefusalError, ValueError):
    """A field that the engine, the caps or other fields rule out. To an operator it is a ValueError."""


class SpeculativeChange(Body):
    """The operator's wishes from now on."""

    defaults: SpeculativeField | None = None
    caps: SpeculativeCaps | None = None


_OF_CHANGES = OwnNames({"speculative": "defaults", "speculative_caps": "caps"})


class SpeculativeResolver:
    """Turns ``speculative`` objects into the engine's parameters, for one engine and one
    operator's wishes.

    ``wished``: what the operator said of the default; ``defaults``: what a request gets that says
    nothing; ``allowed``: the drafters that requests may name; ``max_tokens``: the most that they may
    draft in a step. Raises UnfitSpeculationError where the default does not fit the engine or the caps.
    """

    def __init__(self, info: EngineInfo, default: SpeculativeField, caps: SpeculativeCaps) -> None:
        self.info = info
        self.caps = caps
        self.wished = default.given()
        wanted, cap = caps.draft_strategies, caps.max_speculative_tokens
        self.max_tokens = info.max_num_nodes if cap is None else min(info.max_num_nodes, cap)
        unknown = sorted(set(wanted or ()) - set(info.drafters))
        if unknown:
            reason = f"name a drafter that is not loaded: {unknown[0]}"
            raise UnfitSpeculationError(("speculative_caps.draft_strategies", reason))
        self.allowed = [
            name for name in info.drafters if name == NO_DRAFTER or wanted is None or name in wanted
        ]
        self._built_in = self.defaults = self._capped(_BUILT_IN)
        self.defaults = self._overlaid(default)

    def changed(self, change: SpeculativeChange, *, from_built_in: bool) -> SpeculativeResolver:
        """Returns what serves with the fields given in place of the present wishes.

        ``from_built_in``: in place of the built-in values, all wishes till now forgotten. Raises ApiError
        400 naming the field at fault.
        """
        defaults = {} if from_built_in else self.wished
        caps = {} if from_built_in else self.caps.given()
        if change.defaults is not None:
            defaults = defaults | change.defaults.given()
        if change.caps is not None:
            caps = caps | change.caps.given()
        with _OF_CHANGES.in_refusals():
            return SpeculativeResolver(
                self.info, SpeculativeField(**defaults), SpeculativeCaps(**caps)
            )

    def held_to(self, drafters: Sequence[str] | None) -> SpeculativeResolver:
        """Returns what serves requests that may have these drafters only, and plain decoding; None: any.

        Where the default is none of them the first that can be takes its place, with nothing that was
        wished for the other.
        """
        if drafters is None:
            return self
        held = copy(self)
        held.allowed = [name for name in self.allowed if name == NO_DRAFTER or name in drafters]
        if self.defaults.draft_strategy not in (NO_DRAFTER, *held.allowed):
            # What needs more of a request than that it asks for nothing is no default.
            able = (
                each for each in drafters if each in self.allowed and each != PREDICTION_DRAFTER
            )
            held.defaults = replace(self._built_in, draft_strategy=next(able, NO_DRAFTER))
        return held

    def resolve(
        self, asked: SpeculativeField | None, has_prediction: bool = False
    ) -> SpeculativeParams:
        """Returns every option of a request, by the request or the server, and all in agreement. Raises
        UnfitSpeculationError naming the field at fault."""
        given = {} if asked is None else asked.given()
        info = self._drafter(given.get("draft_strategy"), has_prediction)
        own = self._drafter_options(info, given.get("options", {}))
        shown = given.get("return_drafted", self.defaults.return_drafted)
        if info.name == NO_DRAFTER:
            for name in given:
                if name not in _WITHOUT_A_DRAFTER:
                    raise _no_effect(name, f"draft_strategy {NO_DRAFTER!r}")
            return replace(PLAIN, return_drafted=shown)
        policy = self._policy(given)
        num, low, high = self._depth(given, policy)
        shape = self._shape(given, info, high)
        is_aimed = _RATE in policy_info(policy).settings
        rate = given.get(_RATE, self.defaults.target_acceptance_rate)
        return replace(
            self.defaults,
            draft_strategy=info.name,
            adaptive_depth=policy,
            num_speculative_tokens=num,
            min_speculative_tokens=low,
            max_speculative_tokens=high,
            target_acceptance_rate=rate if is_aimed else None,
            verification=self._verification(given, info, is_wide=shape.get("tree_width", 1) > 1),
            options=own,
            return_drafted=shown,
            **shape,
        )

    def _capped(self, params: SpeculativeParams) -> SpeculativeParams:
        """Returns the parameters within the caps and with a drafter that is allowed."""
        usual = (name for name in USUAL_DRAFTERS if name in self.allowed)
        return replace(
            params,
            draft_strategy=next(usual, NO_DRAFTER),
            num_speculative_tokens=min(params.num_speculative_tokens, self.max_tokens),
            max_speculative_tokens=min(params.max_speculative_tokens, self.max_tokens),
            tree_width=min(params.tree_width, self.caps.max_tree_width),
            tree_depth=min(params.tree_depth, self.caps.max_tree_depth),
        )

    def _overlaid(self, default: SpeculativeField) -> SpeculativeParams:
        """Returns the defaults overlaid with the operator's wishes, where those are sound."""
        found = self.resolve(default)
        # What is not the operator's word is the built-in one, not what it had to give way to. With no
        # drafter, a request may still name one: it then gets the built-in depth.
        changes = {**self.wished, "draft_strategy": found.draft_strategy}
        changes.pop("adaptive_depth", None)
        if found.draft_strategy != NO_DRAFTER:
            settled = ("adaptive_depth", _NUM, _LOW, "tree_strategy", "verification")
            changes |= {name: getattr(found, name) for name in settled}
            is_bounded = _HIGH in policy_info(found.adaptive_depth).settings
            high = (found if is_bounded else self.defaults).max_speculative_tokens
            changes[_HIGH] = max(high, found.num_speculative_tokens)
        return replace(self.defaults, **changes)

    def _drafter(self, asked: str | None, has_prediction: bool) -> DrafterInfo:
        name = self.defaults.draft_strategy if asked is None else asked
        if name not in self.allowed:
            raise _refuse("draft_strategy", f"must be one of: {', '.join(self.allowed)}")
        if not has_prediction:
            if asked == PREDICTION_DRAFTER:
                raise _refuse("draft_strategy", f"{PREDICTION_DRAFTER!r} needs a 'prediction'")
            return self.info.drafters[name]
        takers = [each for each in self.allowed if self.info.drafters[each].takes_prediction]
        if name not in takers and asked is None and PREDICTION_DRAFTER in takers:
            name = PREDICTION_DRAFTER
        if name not in takers:
            able = (
                f"one of: {', '.join(takers)}" if takers else "one that this server does not offer"
            )
            raise UnfitSpeculationError(("prediction", f"needs another draft_strategy: {able}"))
        return self.info.drafters[name]

    def _drafter_options(
        self, info: DrafterInfo, given: Mapping[str, Any]
    ) -> dict[str, OptionValue]:
        # The server's default options belong to its default drafter and to no other.
        is_default = info.name == self.defaults.draft_strategy
        inherited = self.defaults.options if is_default else {}
        try:
            # All at once: whether one fits may hang on another.
            return info.resolve({**inherited, **given})
        except OptionError as error:
            # Where the request gives none of those at fault, it has them from the server's default.
            name = next((f"options.{each}" for each in error.names if each in given), "options")
            fault = f": {error}".removeprefix(f": {name.removeprefix('options.')} ")
            raise _refuse(name, fault) from error

    def _policy(self, given: Mapping[str, Any]) -> str:
        asked = given.get("adaptive_depth", self.defaults.adaptive_depth)
        policy: str = asked
        if asked is True:
            # The server's adaptive policy.
            is_adaptive = _HIGH in policy_info(self.defaults.adaptive_depth).settings
            policy = (self.defaults if is_adaptive else _BUILT_IN).adaptive_depth
        elif asked is False:
            policy = FIXED_POLICY
        settings = policy_info(policy).settings
        for name in (_NUM, _LOW, _HIGH, _RATE):
            if name in given and name not in settings:
                raise _no_effect(name, f"adaptive_depth {policy!r}")
        return policy

    def _depth(self, given: Mapping[str, Any], policy: str) -> tuple[int, int, int]:
        """(num, min, max): what was given stands, what was not gives way to it."""
        for name in (_NUM, _LOW, _HIGH):
            if given.get(name, 0) > self.max_tokens:
                raise _refuse(name, f"must be at most {self.max_tokens} on this server")
        num, low, high = given.get(_NUM), given.get(_LOW), given.get(_HIGH)
        if _HIGH not in policy_info(policy).settings:
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
        asked = given.get("tree_strategy")
        wanted = asked or self.defaults.tree_strategy
        is_tree = wanted == "tree"
        if asked is None and given.get("verification") == "block":
            is_tree = False
        if is_tree and not info.drafts_trees:
            if asked == "tree":
                raise _refuse("tree_strategy", f"drafter {info.name!r} takes no tree shape")
            is_tree = False
        longest = max(1, high)
        caps = {
            "tree_width": self.caps.max_tree_width,
            "tree_depth": min(self.caps.max_tree_depth, longest),
        }
        for name, cap in caps.items():
            if name in given and not is_tree:
                raise _no_effect(name, "a tree_strategy other than 'tree'")
            if given.get(name, 0) > cap:
                raise _refuse(name, f"must be at most {cap} for this request")
        if not is_tree:
            is_open = wanted == "auto" and info.drafts_trees and self.caps.max_tree_width > 1
            return {"tree_strategy": "auto" if is_open else "linear"}
        return {
            "tree_strategy": "tree",
            "tree_width": given.get("tree_width", self.defaults.tree_width),
            "tree_depth": given.get("tree_depth", min(self.defaults.tree_depth, longest)),
        }

    def _verification(
        self, given: Mapping[str, Any], info: DrafterInfo, is_wide: bool
    ) -> VerificationName:
        """Returns the verification; the server's default gives way where it cannot be."""
        wanted: VerificationName = given.get("verification", self.defaults.verification)
        possible = wanted
        if wanted != "match" and not info.samples:
            possible = "match"
            why = f"drafter {info.name!r} does not draw from a distribution of its own"
        elif wanted == "block" and is_wide:
            possible, why = "rejection", "'block' is for chains"
        if possible != wanted and "verification" in given:
            raise _refuse("verification", f"must be {possible!r} for this request: {why}")
        return possible


ChangeSpeculation: TypeAlias = Callable[..., Awaitable[SpeculativeResolver]]
"""Changes speculation for all requests that are read once it has returned. Arguments and errors are those
of ``SpeculativeResolver.changed``."""


def _refuse(name: str, reason: str) -> UnfitSpeculationError:
    return UnfitSpeculationError((f"speculative.{name}", reason))


def _no_effect(name: str, where: str) -> UnfitSpeculationError:
    return _refuse(name, f"has no effect with {where}; leave one of them out")
