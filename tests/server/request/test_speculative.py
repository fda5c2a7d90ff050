from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftShape
from drafters.registry import build_drafters
from engine.request.params import PLAIN, SpeculativeParams
from engine.speculation.gamma import policy
from server.errors import ApiError
from server.request.speculative import SpeculativeCaps, SpeculativeField, SpeculativeResolver
from worlds.scripted_engine import ScriptedEngine, engine_info
from worlds.serving import serve

DEPTHS = [f"{which}_speculative_tokens" for which in ("num", "min", "max")]


def resolver(default: dict[str, Any] | None = None, **caps: Any) -> SpeculativeResolver:
    return SpeculativeResolver(
        engine_info(), SpeculativeField(**(default or {})), SpeculativeCaps(**caps)
    )


def resolve(fields: dict[str, Any], default: dict[str, Any] | None = None) -> SpeculativeParams:
    return resolver(default).resolve(SpeculativeField(**fields))


def depth(
    num: int | None = None,
    low: int | None = None,
    high: int | None = None,
    policy: bool | str | None = None,
) -> dict[str, Any]:
    """The fields of gamma that are given."""
    fields = zip((*DEPTHS, "adaptive_depth"), (num, low, high, policy), strict=True)
    return {name: value for name, value in fields if value is not None}


def depths_of(params: SpeculativeParams) -> tuple[int, int, int]:
    num, low, high = (getattr(params, name) for name in DEPTHS)
    return num, low, high


def test_what_nobody_says_is_as_the_server_has_it() -> None:
    assert resolver().resolve(None) == SpeculativeParams(
        draft_strategy="ngram", tree_strategy="linear", options={"max_match": 4}
    )
    assert resolve({"draft_strategy": "none"}) == PLAIN
    assert resolve({"adaptive_depth": "target_rate"}).target_acceptance_rate is None
    assert resolve({"target_acceptance_rate": 0.4}).target_acceptance_rate == 0.4
    undrafted = {"draft_strategy": "none"}
    assert resolve({}, undrafted).draft_strategy == "none"
    assert depths_of(resolve({"draft_strategy": "ngram"}, undrafted)) == (8, 0, 16)
    with pytest.raises(ApiError, match="none, ngram, nasd"):
        resolve({"draft_strategy": "eagle3"})


async def test_every_field_is_taken_at_its_word() -> None:
    """The example of the design, with this test's drafter."""
    fields = {
        "draft_strategy": "sampler",
        **depth(5, 1, 15, "target_rate"),
        "target_acceptance_rate": 0.6,
        "tree_strategy": "tree",
        "tree_width": 3,
        "tree_depth": 7,
        "verification": "rejection",
        "options": {"heat": 0.25},
        "return_drafted": True,
    }
    assert fields.keys() == SpeculativeField.model_fields.keys()
    engine = ScriptedEngine("hello")
    async with serve(engine) as client:
        body = {"prompt": "a", "speculative": fields}
        reply = (await client.post("/completions", json=body)).json()
    assert engine.requests[0].speculative == SpeculativeParams(**fields)
    assert "".join(token["text"] for token in reply["choices"][0]["tokens"]) == "hello"


@pytest.mark.parametrize(
    ("fields", "policy", "depths"),
    [
        (depth(policy=False), "fixed", (8, 0, 8)),
        (depth(3, policy="fixed"), "fixed", (3, 0, 3)),
        (depth(0, policy=False), "fixed", (0, 0, 0)),
        (depth(policy=True), "goodput", (8, 0, 16)),
        (depth(20), "goodput", (20, 0, 20)),
        (depth(4), "goodput", (4, 0, 4)),
        (depth(4, high=8), "goodput", (4, 0, 8)),
        (depth(high=4), "goodput", (4, 0, 4)),
        (depth(high=32), "goodput", (8, 0, 32)),
        (depth(low=12), "goodput", (12, 12, 16)),
        (depth(low=20), "goodput", (20, 20, 20)),
        (depth(30, policy="target_rate"), "target_rate", (30, 0, 30)),
        (depth(4, 2, 8, "target_rate"), "target_rate", (4, 2, 8)),
    ],
)
def test_what_is_given_stands_and_the_rest_gives_way(
    fields: dict[str, Any], policy: str, depths: tuple[int, int, int]
) -> None:
    params = resolve(fields)
    assert (params.adaptive_depth, depths_of(params)) == (policy, depths)


def test_a_policy_of_ones_own_takes_the_fields_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "_POLICIES", dict(policy._POLICIES))

    @policy.gamma_policy("half", "half of the most", ["max_speculative_tokens"])
    class HalfPolicy(policy.GammaPolicy):
        def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
            del request_id
            return params.max_speculative_tokens // 2

    params = resolve({"adaptive_depth": "half", "max_speculative_tokens": 6})
    assert (params.adaptive_depth, params.max_speculative_tokens) == ("half", 6)
    assert params.target_acceptance_rate is None
    with pytest.raises(ApiError) as refused:
        resolve({"adaptive_depth": "half", "target_acceptance_rate": 0.5})
    assert refused.value.param == "speculative.target_acceptance_rate"
    assert resolve({}, {"adaptive_depth": "half"}).adaptive_depth == "half"


TREE = {"draft_strategy": "nasd", "tree_strategy": "tree"}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, DraftShape(1, 16)),
        ({"tree_strategy": "linear"}, DraftShape(1, 16)),
        ({"tree_strategy": "none", "max_speculative_tokens": 5}, DraftShape(1, 5)),
        (TREE, DraftShape(2, 6)),
        (TREE | {"tree_width": 4, "tree_depth": 9}, DraftShape(4, 9)),
        (TREE | {"max_speculative_tokens": 3}, DraftShape(2, 3)),
        ({"max_speculative_tokens": 0}, DraftShape(1, 1)),
    ],
)
def test_shapes(fields: dict[str, Any], shape: DraftShape) -> None:
    assert resolve(fields).shape == shape


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft_strategy": "eagle3"}, "draft_strategy"),
    ({"draft_strategy": "none", "num_speculative_tokens": 4}, "num_speculative_tokens"),
    ({"draft_strategy": "none", "tree_strategy": "tree"}, "tree_strategy"),
    ({"draft_strategy": "none", "adaptive_depth": True}, "adaptive_depth"),
    ({"draft_strategy": "none", "options": {"max_match": 1}}, "options.max_match"),
    (depth(33), "num_speculative_tokens"),
    (depth(high=33), "max_speculative_tokens"),
    (depth(low=33), "min_speculative_tokens"),
    (depth(low=9, high=8), "min_speculative_tokens"),
    (depth(4, low=6), "min_speculative_tokens"),
    (depth(9, high=8, policy="target_rate"), "num_speculative_tokens"),
    (depth(1, low=2, policy="target_rate"), "num_speculative_tokens"),
    (depth(low=1, policy=False), "min_speculative_tokens"),
    (depth(high=9, policy=False), "max_speculative_tokens"),
    (depth(policy=False) | {"target_acceptance_rate": 0.5}, "target_acceptance_rate"),
    ({"tree_strategy": "tree"}, "tree_strategy"),
    ({"tree_width": 2}, "tree_width"),
    ({"tree_strategy": "linear", "tree_depth": 2}, "tree_depth"),
    (TREE | {"tree_width": 9}, "tree_width"),
    (TREE | {"tree_depth": 17}, "tree_depth"),
    ({"options": {"colour": 1}}, "options.colour"),
    ({"options": {"max_match": 17}}, "options.max_match"),
    ({"options": {"max_match": "4"}}, "options.max_match"),
    ({"options": {"max_match": True}}, "options.max_match"),
    ({"draft_strategy": "nasd", "options": {"max_match": 4}}, "options.max_match"),
    *(
        ({"draft_strategy": "nasd", "options": {"decay": beyond}}, "options.decay")
        for beyond in (math.nan, math.inf, 10**400)
    ),
]


@pytest.mark.parametrize(("fields", "name"), REFUSED)
def test_the_impossible_and_the_ineffective_are_refused_by_name(
    fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(ApiError) as refused:
        resolve(fields)
    assert refused.value.status == 400
    assert refused.value.param == f"speculative.{name}"
    assert name in refused.value.message


CORE = engine_info(
    drafters={name: each.info for name, each in build_drafters().items()}, max_num_nodes=32
)
"""An engine with the drafters that need no model, as they are."""


@pytest.mark.parametrize(
    ("drafter", "options", "fault"),
    [
        ("nasd", {"n": 6, "min_context": 4}, ""),
        ("nasd", {"min_context": 4, "n": 6}, ""),
        ("ngram", {"ngram_min": 9, "ngram_max": 12}, ""),
        ("stand", {"min_ctx": 6, "max_ctx": 8}, ""),
        ("nasd", {"n": 3, "min_context": 3}, "min_context"),
        ("nasd", {"n": 2, "filler_top_k": 2, "min_context": 2}, "min_context"),
        ("nasd", {"n": 9, "min_context": 1}, "n"),
        ("nasd", {"min_context": 2, "a-b": 1}, "a-b"),
        ("ngram", {"ngram_max": 2, "ngram_min": 3}, "ngram_min"),
        ("ngram", {"ngram_max": 1}, "ngram_max"),
        ("stand", {"min_ctx": 5, "share": True}, "min_ctx"),
        ("jacobi", {"window": 4, "first_guess": "none"}, "first_guess"),
    ],
)
def test_options_are_judged_together(drafter: str, options: dict[str, Any], fault: str) -> None:
    asked = SpeculativeField(draft_strategy=drafter, options=options)
    subject = SpeculativeResolver(CORE, SpeculativeField(), SpeculativeCaps())
    if not fault:
        assert options.items() <= subject.resolve(asked).options.items()
        return
    with pytest.raises(ApiError) as refused:
        subject.resolve(asked)
    assert refused.value.param == f"speculative.options.{fault}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_match": 17}, "options.max_match must be at most 16"),
        ({"colour": 1}, "options.colour: ngram has no option 'colour'; it has: max_match"),
    ],
)
def test_a_refused_option_is_named_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        resolve({"draft_strategy": "ngram", "options": options})
    assert refused.value.message == f"speculative.{said}"


def test_a_request_answers_for_what_does_not_fit_the_servers_options() -> None:
    default = SpeculativeField(draft_strategy="nasd", options={"n": 6, "min_context": 4})
    subject = SpeculativeResolver(CORE, default, SpeculativeCaps())
    assert subject.resolve(None).options["min_context"] == 4
    with pytest.raises(ApiError) as refused:
        subject.resolve(SpeculativeField(options={"n": 4}))
    assert refused.value.param == "speculative.options.n"
    assert subject.resolve(SpeculativeField(options={"n": 5})).options["n"] == 5


SAMPLER = {"draft_strategy": "sampler"}
SAMPLER_TREE = SAMPLER | {"tree_strategy": "tree"}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"verification": "rejection"}, "must be 'match' .* 'ngram' does not draw"),
        ({"draft_strategy": "nasd", "verification": "block"}, "must be 'match'"),
        ({"draft_strategy": "none", "verification": "rejection"}, "no effect"),
        (SAMPLER_TREE | {"verification": "block"}, "must be 'rejection' .* for chains"),
        (SAMPLER, ""),
        (SAMPLER | {"verification": "rejection"}, ""),
        (SAMPLER | {"verification": "block"}, ""),
        (SAMPLER_TREE | {"verification": "rejection"}, ""),
        (SAMPLER_TREE | {"tree_width": 1, "verification": "block"}, ""),
        ({"verification": "match"}, ""),
    ],
)
def test_a_verification_that_cannot_be_is_refused(fields: dict[str, Any], part: str) -> None:
    if not part:
        assert resolve(fields).verification == fields.get("verification", "match")
        return
    with pytest.raises(ApiError, match=part) as refused:
        resolve(fields)
    assert refused.value.param == "speculative.verification"


def test_a_default_verification_gives_way_to_what_a_request_names() -> None:
    block = SAMPLER | {"verification": "block"}
    assert resolve({}, block).verification == "block"
    assert resolve({"draft_strategy": "nasd"}, block).verification == "match"
    assert resolve({"tree_strategy": "tree"}, block).verification == "rejection"
    assert resolve({"verification": "match"}, block).verification == "match"
    chain = resolve({"verification": "block"}, SAMPLER_TREE)
    assert (chain.verification, chain.shape.width) == ("block", 1)
    with pytest.raises(ValueError, match="must be 'rejection'"):
        resolver(SAMPLER_TREE | {"verification": "block"})


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"adaptive_depth": "often"}, "true, false, or one of: fixed, target_rate, goodput"),
        ({"adaptive_depth": 1}, "true, false"),
        ({"verification": "typical"}, "'match', 'rejection' or 'block'"),
        ({"tree_strategy": "bush"}, "'none', 'linear' or 'tree'"),
        ({"options": {"a": None}}, "booleans, numbers and strings"),
        ({"options": [1]}, "must be an object"),
        ({"num_speculative_tokens": True}, "valid integer"),
        ({"target_acceptance_rate": 1.0}, "less than 1"),
        ({"enabled": True}, "Extra inputs"),
    ],
)
def test_values_that_do_not_exist_are_answered_with_those_that_do(
    fields: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        SpeculativeField(**fields)


def test_server_defaults_apply_to_what_a_request_leaves_open() -> None:
    default = {
        "draft_strategy": "nasd",
        **depth(3, 1, 6, "target_rate"),
        "target_acceptance_rate": 0.5,
        "tree_strategy": "tree",
        "tree_width": 3,
        "tree_depth": 4,
        "options": {"decay": 0.9},
    }
    complete = default | {"options": {"fill": True, "decay": 0.9}}
    assert resolve({}, default) == SpeculativeParams(**complete)
    other = resolve({"draft_strategy": "ngram"}, default)
    # It drafts no trees, and the default's options are not its own: both were defaults, not wishes.
    assert other.shape == DraftShape(1, 6)
    assert other.options == {"max_match": 4}
    assert resolve({"adaptive_depth": True}, default).adaptive_depth == "target_rate"
    assert resolve({"options": {"fill": False}}, default).options == {"fill": False, "decay": 0.9}


def test_operator_caps_bound_requests_and_defaults() -> None:
    capped = resolver(max_speculative_tokens=4, draft_strategies=["nasd"], max_tree_width=2)
    assert capped.resolve(None) == PLAIN
    nasd = capped.resolve(SpeculativeField(draft_strategy="nasd"))
    assert depths_of(nasd) == (4, 0, 4)
    for fields, name in (
        ({"draft_strategy": "ngram"}, "draft_strategy"),
        ({"draft_strategy": "nasd", "max_speculative_tokens": 5}, "max_speculative_tokens"),
        (TREE | {"tree_width": 3}, "tree_width"),
    ):
        with pytest.raises(ApiError) as refused:
            capped.resolve(SpeculativeField(**fields))
        assert refused.value.param == f"speculative.{name}"


def test_a_tenant_gets_the_first_of_its_own_drafters_where_the_default_is_none_of_them() -> None:
    default = {"draft_strategy": "nasd", "options": {"decay": 0.9}, **depth(3)}
    subject = resolver(default)
    assert subject.held_to(None) is subject
    assert subject.held_to(["ngram", "nasd"]).resolve(None) == subject.resolve(None)
    held = subject.held_to(["prediction", "ngram", "eagle3"])
    assert held.allowed == ["none", "ngram", "prediction"]
    assert held.resolve(None) == resolver().resolve(None)
    assert subject.held_to(["prediction"]).resolve(None) == PLAIN
    with pytest.raises(ApiError, match="none, ngram, prediction"):
        held.resolve(SpeculativeField(draft_strategy="nasd"))


depths = st.one_of(st.none(), st.integers(0, 40))


@given(
    num=depths,
    low=depths,
    high=depths,
    policy=st.sampled_from([None, True, False, "fixed", "target_rate", "goodput"]),
    cap=st.integers(0, 40),
)
def test_whatever_is_accepted_is_consistent(
    num: int | None, low: int | None, high: int | None, policy: Any, cap: int
) -> None:
    asked = SpeculativeField(**depth(num, low, high, policy))
    try:
        params = resolver(max_speculative_tokens=cap).resolve(asked)
    except ApiError:
        return
    found = depths_of(params)
    assert 0 <= found[1] <= found[0] <= found[2] <= min(cap, 32)
    for wanted, had in zip((num, low, high), found, strict=True):
        assert wanted in (None, had)
    assert params.shape.depth == max(1, params.max_speculative_tokens)
