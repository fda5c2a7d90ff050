"""Every field of every wire model either changes what happens or is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Connect
from scripted_engine import EOS, ScriptedEngine, byte_tokenizer

from engine.params import GenerationRequest
from server.protocol import ChatRequest, CompletionRequest
from server.speculative import SpeculativeField
from server.wire import Wire

pytestmark = pytest.mark.anyio

TEXT = "hello wörld. the end"
COMPLETION = {"prompt": "ab", "max_tokens": 64}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 64}


class Outcome:
    """What one request led to."""

    def __init__(self, requests: list[GenerationRequest], reply: Any, raw: str, log: str) -> None:
        self.requests = requests
        self.request = requests[0]
        self.sampling = self.request.sampling
        self.spec = self.request.speculative
        self.reply = reply
        self.raw = raw
        self.log = log

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.reply["choices"][0]
        return choice

    @property
    def text(self) -> str:
        message = self.choice.get("message")
        return str(self.choice["text"] if message is None else message["content"])


Check = Callable[[Outcome], bool]

# field -> (fields sent, whether it had its effect); without the field the effect must be absent.
SHARED: dict[str, tuple[dict[str, Any], Check]] = {
    "n": ({"n": 3}, lambda o: len(o.reply["choices"]) == 3),
    "temperature": ({"temperature": 0}, lambda o: o.sampling.temperature == 0),
    "top_p": ({"top_p": 0.5}, lambda o: o.sampling.top_p == 0.5),
    "top_k": ({"top_k": 7}, lambda o: o.sampling.top_k == 7),
    "min_p": ({"min_p": 0.1}, lambda o: o.sampling.min_p == 0.1),
    "presence_penalty": ({"presence_penalty": 1}, lambda o: o.sampling.presence_penalty == 1),
    "frequency_penalty": ({"frequency_penalty": -1}, lambda o: o.sampling.frequency_penalty == -1),
    "repetition_penalty": (
        {"repetition_penalty": 1.2},
        lambda o: o.sampling.repetition_penalty == 1.2,
    ),
    "logit_bias": ({"logit_bias": {"5": -3}}, lambda o: o.sampling.logit_bias == {5: -3}),
    "bad_words": (
        {"bad_words": ["x"]},
        lambda o: o.sampling.bad_words_token_ids == ((120,), (32, 120)),
    ),
    "seed": ({"seed": 11}, lambda o: o.sampling.seed == 11 and o.reply["seed"] == 11),
    "min_tokens": ({"min_tokens": 4}, lambda o: o.sampling.min_tokens == 4),
    "max_tokens": ({"max_tokens": 5}, lambda o: o.sampling.max_tokens == 5),
    "stop": ({"stop": ["wör"]}, lambda o: o.text.endswith("hello ")),
    "stop_token_ids": (
        {"stop_token_ids": [119]},
        lambda o: o.text.endswith("hello ") and o.choice["stop_reason"] == 119,
    ),
    "include_stop_str_in_output": (
        {"stop": ".", "include_stop_str_in_output": True},
        lambda o: o.text.endswith("wörld."),
    ),
    "ignore_eos": ({"ignore_eos": True}, lambda o: o.sampling.ignore_eos),
    "skip_special_tokens": (
        {"skip_special_tokens": False, "ignore_eos": True},
        lambda o: o.text.endswith("</s>"),
    ),
    "return_token_ids": (
        {"return_token_ids": True},
        lambda o: (
            o.choice.get("token_ids") == list(TEXT.encode())
            and o.choice["prompt_token_ids"] == list(o.request.prompt_token_ids)
        ),
    ),
    "priority": ({"priority": -2}, lambda o: o.request.priority == -2),
    "cache_salt": ({"cache_salt": "tenant"}, lambda o: o.request.salt == "tenant"),
    "user": ({"user": "someone"}, lambda o: "user='someone'" in o.log),
    "stream": ({"stream": True}, lambda o: o.raw.startswith("data: ")),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda o: '"usage":{' in o.raw and o.raw.startswith("data: "),
    ),
    "speculative": (
        {"speculative": {"draft_strategy": "nasd"}},
        lambda o: o.spec.drafter == "nasd" and o.reply["usage"]["speculative"]["drafter"] == "nasd",
    ),
    "prediction": (
        {"prediction": {"type": "content", "content": "hello"}},
        lambda o: (
            o.spec.reference_token_ids == tuple(b"hello")
            and "completion_tokens_details" in o.reply["usage"]
        ),
    ),
}
COMPLETION_ONLY: dict[str, tuple[dict[str, Any], Check]] = {
    "prompt": ({"prompt": [1, 2, 3]}, lambda o: o.request.prompt_token_ids == (1, 2, 3)),
    "echo": ({"echo": True}, lambda o: o.text == "ab" + TEXT),
    "logprobs": (
        {"logprobs": 2},
        lambda o: (
            o.sampling.logprobs == 2 and len(o.choice["logprobs"]["tokens"]) == len(TEXT.encode())
        ),
    ),
}
CHAT_ONLY: dict[str, tuple[dict[str, Any], Check]] = {
    "messages": (
        {"messages": [{"role": "system", "content": "zz"}, {"role": "user", "content": "ab"}]},
        lambda o: (
            b"system: zz\n" in bytes(each for each in o.request.prompt_token_ids if each < 256)
        ),
    ),
    "max_completion_tokens": (
        {"max_completion_tokens": 9, "max_tokens": None},
        lambda o: o.sampling.max_tokens == 9,
    ),
    "logprobs": (
        {"logprobs": True},
        lambda o: (
            o.sampling.logprobs == 0 and len(o.choice["logprobs"]["content"]) == len(TEXT.encode())
        ),
    ),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 3},
        lambda o: len(o.choice["logprobs"]["content"][0]["top_logprobs"]) == 3,
    ),
    "add_generation_prompt": (
        {"add_generation_prompt": False},
        lambda o: o.request.prompt_token_ids[-1] == ord("\n"),
    ),
    "continue_final_message": (
        {"add_generation_prompt": False, "continue_final_message": True},
        lambda o: o.request.prompt_token_ids[-1] == ord("b"),
    ),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"shout": True}},
        lambda o: b"LOUD" in bytes(each for each in o.request.prompt_token_ids if each < 256),
    ),
}
# Accepted for their meaning, which the server has anyway; another value is a 400.
WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "model": ("test/scripted", "gpt-4"),
    "store": (False, True),
    "response_format": ({"type": "text"}, {"type": "json_schema", "json_schema": {}}),
}
COMPLETION_WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "best_of": (1, 2),
    "add_special_tokens": (True, "yes"),
}
CHAT_WITHOUT_CHANGE: dict[str, tuple[Any, Any]] = {
    "modalities": (["text"], ["text", "audio"]),
    "tool_choice": ("none", "auto"),
    "add_special_tokens": (False, "no"),
}
ENDPOINTS: dict[str, tuple[type[Wire], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "/completions": (
        CompletionRequest,
        COMPLETION,
        SHARED | COMPLETION_ONLY,
        WITHOUT_CHANGE | COMPLETION_WITHOUT_CHANGE,
    ),
    "/chat/completions": (
        ChatRequest,
        CHAT,
        SHARED | CHAT_ONLY,
        WITHOUT_CHANGE | CHAT_WITHOUT_CHANGE,
    ),
}


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
    parsed = None if reply.text.startswith("data:") else reply.json()
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
    body = base | dict.fromkeys([*model.unsupported, *model.fixed])
    async with connect(ScriptedEngine(TEXT)) as client:
        assert (await client.post(path, json=body)).status_code == 200


NASD = {"draft_strategy": "nasd"}
SPECULATIVE: dict[str, tuple[dict[str, Any], Check]] = {
    "draft_strategy": (NASD, lambda o: o.spec.drafter == "nasd"),
    "num_speculative_tokens": (
        {"num_speculative_tokens": 5, "adaptive_depth": False},
        lambda o: o.spec.num_tokens == 5,
    ),
    "adaptive_depth": ({"adaptive_depth": "target_rate"}, lambda o: o.spec.policy == "target_rate"),
    "min_speculative_tokens": ({"min_speculative_tokens": 3}, lambda o: o.spec.min_tokens == 3),
    "max_speculative_tokens": ({"max_speculative_tokens": 9}, lambda o: o.spec.max_tokens == 9),
    "target_acceptance_rate": (
        {"target_acceptance_rate": 0.9, "adaptive_depth": "target_rate"},
        lambda o: o.spec.target_acceptance_rate == 0.9,
    ),
    "tree_strategy": (NASD | {"tree_strategy": "tree"}, lambda o: o.spec.shape.width == 2),
    "tree_width": (
        NASD | {"tree_strategy": "tree", "tree_width": 4},
        lambda o: o.spec.shape.width == 4,
    ),
    "tree_depth": (
        NASD | {"tree_strategy": "tree", "tree_depth": 3},
        lambda o: o.spec.shape.depth == 3,
    ),
    "options": ({"options": {"max_match": 9}}, lambda o: o.spec.options["max_match"] == 9),
    "verification": (
        {"draft_strategy": "sampler", "verification": "rejection"},
        lambda o: o.spec.verification == "rejection",
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
