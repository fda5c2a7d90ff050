"""Every field of every model of a body either changes what happens or is refused by name."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from server.request.speculative import SpeculativeField
from worlds.request_bodies import COMPLETION, ENDPOINTS, TEXT, Check, Outcome
from worlds.scripted_engine import EOS, ScriptedEngine, byte_tokenizer
from worlds.serving import Connect

pytestmark = pytest.mark.anyio


def cases(column: int) -> list[Any]:
    return [
        pytest.param(path, name, id=f"{path}-{name}")
        for path, row in ENDPOINTS.items()
        for name in row[column]
    ]


async def send(connect: Connect, path: str, body: dict[str, Any], caplog: Any) -> Outcome:
    engine = ScriptedEngine(TEXT)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="slipstream.requests"):
        async with connect(engine) as client:
            reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    parsed = None if reply.text.startswith(("data:", "event:")) else reply.json()
    return Outcome(engine.requests, parsed, reply.text, caplog.text)


def had_effect(check: Check, outcome: Outcome) -> bool:
    """A check that finds no such field in the reply has found no effect."""
    try:
        return bool(check(outcome))
    except (KeyError, TypeError):
        return False


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_is_listed_here(path: str) -> None:
    model, _, effective, without_change = ENDPOINTS[path]
    assert set(effective) | set(without_change) == set(model.model_fields) | set(model.fixed)


@pytest.mark.parametrize(("path", "name"), cases(2))
async def test_a_supported_field_has_its_effect(
    connect: Connect, caplog: Any, path: str, name: str
) -> None:
    _, base, effective, _ = ENDPOINTS[path]
    fields, check = effective[name]
    assert had_effect(check, await send(connect, path, base | fields, caplog))
    rest = {key: value for key, value in fields.items() if key != name}
    assert not had_effect(check, await send(connect, path, base | rest, caplog))


@pytest.mark.parametrize(("path", "name"), cases(3))
async def test_a_field_with_one_meaning_takes_that_and_refuses_others(
    connect: Connect, path: str, name: str
) -> None:
    _, base, _, without_change = ENDPOINTS[path]
    good, bad = without_change[name]
    async with connect(ScriptedEngine(TEXT)) as client:
        assert (await client.post(path, json=base | {name: good})).status_code == 200
        refused = await client.post(path, json=base | {name: bad})
    assert refused.status_code == (404 if name == "model" else 400)
    assert refused.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(path, name, id=f"{path}-{name}")
        for path, (model, *_) in ENDPOINTS.items()
        for name in [*model.unsupported, "no_such_field"]
    ],
)
async def test_an_unsupported_field_is_a_400_that_names_it(
    connect: Connect, path: str, name: str
) -> None:
    engine = ScriptedEngine(TEXT)
    async with connect(engine) as client:
        refused = await client.post(path, json=ENDPOINTS[path][1] | {name: 1})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == name
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_null_is_not_given(connect: Connect, path: str) -> None:
    model, base, *_ = ENDPOINTS[path]
    optional = [name for name, each in model.model_fields.items() if not each.is_required()]
    engine = ScriptedEngine(TEXT)
    async with connect(engine) as client:
        body = base | dict.fromkeys([*model.unsupported, *model.fixed, *optional]) | {"seed": 1}
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        await client.post(
            path, json={name: base[name] for name in base if base[name]} | {"seed": 1}
        )
        nested = {
            "speculative": dict.fromkeys(SpeculativeField.model_fields),
            "stream_options": dict.fromkeys(["include_usage", "include_obfuscation"]),
        }
        nested = {name: each for name, each in nested.items() if name in model.model_fields}
        reply = await client.post(path, json=base | nested | {"stream": True})
        assert reply.status_code == 200, reply.text
        schemas = (await client.get("http://test/openapi.json")).json()["components"]["schemas"]
    given, left_out = (
        dataclasses.replace(each.sampling, max_tokens=1) for each in engine.requests[:2]
    )
    assert given == left_out
    for name in optional:
        assert {"type": "null"} in schemas[model.__name__]["properties"][name]["anyOf"], name


NASD = {"draft_strategy": "nasd"}
SPECULATIVE: dict[str, tuple[dict[str, Any], Check]] = {
    "draft_strategy": (NASD, lambda o: o.params.draft_strategy == "nasd"),
    "num_speculative_tokens": (
        {"num_speculative_tokens": 5, "adaptive_depth": False},
        lambda o: o.params.num_speculative_tokens == 5,
    ),
    "adaptive_depth": (
        {"adaptive_depth": "target_rate"},
        lambda o: o.params.adaptive_depth == "target_rate",
    ),
    "min_speculative_tokens": (
        {"min_speculative_tokens": 3},
        lambda o: o.params.min_speculative_tokens == 3,
    ),
    "max_speculative_tokens": (
        {"max_speculative_tokens": 9},
        lambda o: o.params.max_speculative_tokens == 9,
    ),
    "target_acceptance_rate": (
        {"target_acceptance_rate": 0.9, "adaptive_depth": "target_rate"},
        lambda o: o.params.target_acceptance_rate == 0.9,
    ),
    "tree_strategy": (NASD | {"tree_strategy": "tree"}, lambda o: o.params.shape.width == 2),
    "tree_width": (
        NASD | {"tree_strategy": "tree", "tree_width": 4},
        lambda o: o.params.shape.width == 4,
    ),
    "tree_depth": (
        NASD | {"tree_strategy": "tree", "tree_depth": 3},
        lambda o: o.params.shape.depth == 3,
    ),
    "options": ({"options": {"max_match": 9}}, lambda o: o.params.options["max_match"] == 9),
    "verification": (
        {"draft_strategy": "sampler", "verification": "rejection"},
        lambda o: o.params.verification == "rejection",
    ),
    "return_drafted": (
        {"return_drafted": True},
        lambda o: "".join(token["text"] for token in o.choice["tokens"]) == TEXT,
    ),
}


def test_every_speculative_field_is_listed_here() -> None:
    assert set(SPECULATIVE) == set(SpeculativeField.model_fields)


@pytest.mark.parametrize("name", SPECULATIVE)
async def test_a_speculative_field_has_its_effect(connect: Connect, caplog: Any, name: str) -> None:
    fields, check = SPECULATIVE[name]
    given = await send(connect, "/completions", COMPLETION | {"speculative": fields}, caplog)
    assert had_effect(check, given)
    rest = {key: value for key, value in fields.items() if key not in (name, "tree_strategy")}
    rest = {} if name == "adaptive_depth" else rest
    without = await send(connect, "/completions", COMPLETION | {"speculative": rest}, caplog)
    assert not had_effect(check, without)


def test_eos_is_what_the_script_ends_with() -> None:
    """``skip_special_tokens`` above relies on it."""
    assert byte_tokenizer().eos_token_id == EOS
