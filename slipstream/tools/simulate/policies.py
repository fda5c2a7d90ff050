"""How a fleet drafts, as the command line says it: ``none``, ``fixed:4``, ``goodput``, ``goodput:8``."""

from __future__ import annotations

from typing import Any

from drafters.options import FIXED_POLICY, NO_DRAFTER
from engine.request.params import PLAIN, SpeculativeParams
from engine.speculation.gamma import gamma_policy_names
from slipstream.tools.simulate.drafting import MeasuredDrafter


def speculative_of(policy: str, drafter: str = MeasuredDrafter.info.name) -> SpeculativeParams:
    """As of a request that names this policy; the number is the most drafts of a step. Raises
    ValueError."""
    name, colon, number = policy.partition(":")
    if name == NO_DRAFTER and not colon:
        return PLAIN
    if name not in gamma_policy_names():
        known = ", ".join((NO_DRAFTER, *gamma_policy_names()))
        raise ValueError(f"policy {policy!r}: none of {known}, with or without :DRAFTS")
    given = {} if not colon else _bounds(name, policy, number)
    return SpeculativeParams(draft_strategy=drafter, adaptive_depth=name, **given)


def _bounds(name: str, policy: str, number: str) -> dict[str, Any]:
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"policy {policy!r}: {number!r} is not a number of drafts")
    most = int(number)
    if name == FIXED_POLICY:
        return {"num_speculative_tokens": most, "max_speculative_tokens": most}
    usual = SpeculativeParams().num_speculative_tokens
    return {"num_speculative_tokens": min(most, usual), "max_speculative_tokens": most}
