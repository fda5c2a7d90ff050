"""Every field of every model of a body either changes what happens or is refused by name."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from server.plan import IGNORED_HEADER
from server.request.speculative import SpeculativeField
from worlds.request_bodies import ENDPOINTS, TEXT, Check, Outcome
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import post, serve


async def send(path: str, body: dict[str, Any], caplog: Any) -> Outcome:
    engine = ScriptedEngine(TEXT)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="slipstream.requests"):
        reply = await post(path, body, engine, log_client_fields=True)
    assert reply.status_code == 200, reply.text
    parsed = None if reply.text.startswith(("data:", "event:")) else reply.json()
    ignored = reply.headers.get(IGNORED_HEADER, "")
    return Outcome(engine.requests, parsed, reply.text, caplog.text, ignored)


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


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, row in ENDPOINTS.items() for name in row[2]]
)
async def test_a_supported_field_has_its_effect(caplog: Any, path: str, name: str) -> None:
    _, base, effective, _ = ENDPOINTS[path]
    fields, check = effective[name]
    assert had_effect(check, await send(path, base | fields, caplog))
    rest = {key: value for key, value in fields.items() if key != name}
    assert not had_effect(check, await send(path, base | rest, caplog))


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_other_fields_take_what_the_server_does_anyway_or_nothing(path: str) -> None:
    model, base, _, without_change = ENDPOINTS[path]
    engine = ScriptedEngine(TEXT)
    async with serve(engine) as client:
        for name, (good, _) in without_change.items():
            taken = await client.post(path, json=base | {name: good})
            assert taken.status_code == 200, name
        num_taken = len(engine.requests)
        bad = {name: each for name, (_, each) in without_change.items()}
        bad |= dict.fromkeys([*model.unsupported, "no_such_field"], 1)
        for name, value in bad.items():
            refused = await client.post(path, json=base | {name: value})
            error = refused.json()["error"]
            assert refused.status_code == (404 if name == "model" else 400), name
            assert error["param"] == name
            assert name in without_change or name in error["message"]
    assert len(engine.requests) == num_taken


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_null_is_not_given(path: str) -> None:
    model, base, *_ = ENDPOINTS[path]
    optional = [name for name, each in model.model_fields.items() if not each.is_required()]
    engine = ScriptedEngine(TEXT)
    async with serve(engine) as client:
        body = base | dict.fromkeys([*model.unsupported, *model.fixed, *optional]) | {"seed": 1}
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        await client.post(
            path, json={name: base[name] for name in base if base[name]} | {"seed": 1}
        )
        nested = {
            "speculative": dict.fromkeys(SpeculativeField.model_fields),
            "stream_options": {"include_obfuscation": None},
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
