"""Every field of every model of a body either changes what happens or is refused by name."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from server.request.speculative import SpeculativeField
from worlds.request_bodies import ENDPOINTS, TEXT, Check, Outcome
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


def test_eos_is_what_the_script_ends_with() -> None:
    """``skip_special_tokens`` above relies on it."""
    assert byte_tokenizer().eos_token_id == EOS
