"""``/api``: Ollama's official client gets what Ollama would say, from the same plan and deltas as all."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import ollama
import pytest

from server.apis.ollama.catalogue import OLLAMA_VERSION
from server.apis.ollama.request import OllamaOptions
from server.request.chat import Chat
from server.request.large_bodies import LARGE
from worlds.official_clients import ollama_client
from worlds.request_bodies import CALL, TOOLS
from worlds.scripted_engine import (
    ASSISTANT,
    BOS,
    THINKING,
    USER,
    ScriptedEngine,
    byte_tokenizer,
    engine_info,
    prompt_text,
)
from worlds.serving import post, serve

TEXT = "hello wörld"
MESSAGES = [{"role": "user", "content": "hi"}]
SWITCHED = THINKING + "{% if enable_thinking is defined and not enable_thinking %}QUIET{% endif %}"
OF_A_REQUEST = ("created_at", "total_duration", "load_duration", "seed")


def lines(text: str) -> list[Any]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def prompt_of(engine: ScriptedEngine, index: int = -1) -> str:
    return prompt_text(engine.requests[index], "|")


async def test_the_official_client_chats() -> None:
    engine = ScriptedEngine(TEXT)
    async with ollama_client(engine) as client:
        reply = await client.chat("test/scripted:latest", MESSAGES, options={"seed": 3})
    assert (reply.message.role, reply.message.content) == ("assistant", TEXT)
    assert (reply.done, reply.done_reason, reply.model) == (True, "stop", "test/scripted:latest")
    assert datetime.fromisoformat(str(reply.created_at)).utcoffset() is not None
    assert reply.eval_count == len(TEXT.encode())
    assert reply.prompt_eval_count == len(engine.requests[0].prompt_token_ids)
    assert (reply.total_duration, reply.load_duration) == (120_000_000, 10_000_000)
    assert (reply.prompt_eval_duration, reply.eval_duration) == (10_000_000, 99_999_999)
    (request,) = engine.requests
    assert list(request.prompt_token_ids) == [USER, *b"user: hi\n", ASSISTANT]
    assert request.sampling.seed == 3


async def test_a_stream_says_what_the_whole_reply_says() -> None:
    engine = ScriptedEngine(f"<think>hm</think>Look.\n{CALL}\n{CALL}")
    async with serve(engine, byte_tokenizer(THINKING)) as http:
        body = {"messages": MESSAGES, "tools": TOOLS, "options": {"seed": 1}}
        streamed = await http.post("http://test/api/chat", json=body)
        whole = await http.post("http://test/api/chat", json=body | {"stream": False})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert whole.headers["content-type"] == "application/json"
    *pieces, last = lines(streamed.text)
    assert not any(each["done"] for each in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    found = [each["message"] for each in pieces]
    message = whole.json()["message"]
    assert message["content"] == "".join(each["content"] for each in found) == "Look."
    assert message["thinking"] == "".join(each.get("thinking", "") for each in found) == "hm"
    calls = [call for each in found for call in each.get("tool_calls", [])]
    assert [each["function"] for each in calls] == [
        {"index": index, "name": "get_weather", "arguments": {"city": "Köln"}} for index in (0, 1)
    ]
    for each in (*calls, *message["tool_calls"]):
        assert each.pop("id").startswith("call")
    assert calls == message["tool_calls"]
    ended = whole.json()
    for each in OF_A_REQUEST:
        last.pop(each)
        ended.pop(each)
    assert {**last, "message": None} == {**ended, "message": None}
    assert last["speculative"]["num_accepted_tokens"] == 7


async def test_the_official_client_streams() -> None:
    async with ollama_client(ScriptedEngine(TEXT)) as client:
        stream = await client.chat("test/scripted", MESSAGES, stream=True)
        chat = [each async for each in stream]
        stream = await client.generate("test/scripted", "hi", stream=True)
        generated = [each async for each in stream]
    assert "".join(each.message.content or "" for each in chat) == TEXT
    assert "".join(each.response or "" for each in generated) == TEXT
    for pieces in (chat, generated):
        assert len(pieces) > 3
        assert [each.done for each in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].eval_count == len(TEXT.encode())


async def test_a_loop_of_tools_goes_round() -> None:
    """The model's calls come back as the client has them: without their ids."""
    engine = ScriptedEngine(f"Look.{CALL}{CALL}")

    def get_weather(city: str) -> str:
        """The weather of a place.

        Args:
            city: Where.
        """
        return f"rain in {city}"

    async with ollama_client(engine) as client:
        first = await client.chat("test/scripted", MESSAGES, tools=[get_weather])
        calls = first.message.tool_calls or []
        answers = [
            {
                "role": "tool",
                "tool_name": call.function.name,
                "content": get_weather(**call.function.arguments),
            }
            for call in calls
        ]
        messages = [*MESSAGES, first.message, *answers]
        await client.chat("test/scripted", messages, tools=[get_weather])
    assert '"description": "Where."' in prompt_of(engine, 0)
    shown = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert prompt_of(engine).endswith(
        f"|assistant: Look.{shown}{shown}\n" + "|tool: rain in Köln\n" * 2 + "|"
    )


async def test_generate_is_a_message_or_text_as_it_is() -> None:
    engine = ScriptedEngine(TEXT)
    async with ollama_client(engine) as client:
        reply = await client.generate("test/scripted", "hi", system="be brief")
        assert reply.response == TEXT
        assert prompt_of(engine) == "|system: be brief\n|user: hi\n|"
        await client.generate("test/scripted", "<|user|>hi", raw=True)
        assert list(engine.requests[1].prompt_token_ids) == [USER, *b"hi"]
        room = engine.info.max_model_len - 3
        assert engine.requests[1].sampling.max_tokens == room
        await client.generate("test/scripted", "<s>", raw=True)
        assert list(engine.requests[2].prompt_token_ids) == [BOS], "the tokenizer's comes once"


def test_every_option_is_a_field_of_chats() -> None:
    said = OllamaOptions().for_request({}).keys()
    assert set(OllamaOptions.model_fields) - said == {"num_predict", "repeat_penalty"}
    assert said <= {*Chat.model_fields}


async def test_options_are_those_of_the_engine() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 11,
        "num_predict": 5,
        "stop": ["x"],
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "speculative": {"draft_strategy": "nasd"},
        "priority": 3,
        "cache_salt": "mine",
    }
    engine = ScriptedEngine(TEXT)
    async with ollama_client(engine) as client:
        reply = await client.chat("test/scripted", MESSAGES, options=options)
        await client.chat("test/scripted", MESSAGES)
        await client.generate("test/scripted", "a", options={"num_predict": -2, "seed": -1})
    assert reply.done_reason == "length"
    assert reply.message.content == "hello"
    request, unsaid, _ = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.5)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 11, 5)
    assert sampling.repetition_penalty == 1.2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert request.speculative.draft_strategy == "nasd"
    assert (request.priority, request.cache_salt) == (3, "mine")
    defaults = unsaid.sampling
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.8, 40, 0.9)
    assert defaults.repetition_penalty == 1
    for each in engine.requests[1:]:
        room = engine.info.max_model_len - len(each.prompt_token_ids)
        assert each.sampling.max_tokens == room


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat", {"options": {"colour": 1}}, "options.colour"),
        ("chat", {"options": {"temperature": 3}}, "options.temperature"),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("chat", {"options": {"seed": -2}}, "options.seed"),
        ("chat", {"options": {"speculative": {"tree_width": 0}}}, "options.speculative.tree_width"),
        ("chat", {"options": {"speculative": {"draft_strategy": "x"}}}, "options.speculative.dr"),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"format": {"type": "colour"}}, "format"),
        ("chat", {"think": True}, "think"),
        ("chat", {"think": "much"}, "think"),
        ("chat", {"top_logprobs": 1}, "top_logprobs"),
        ("chat", {"keep_alive": "soon"}, "keep_alive"),
        ("chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages.0.images"),
        ("chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "tool", "tool_name": "f", "content": "a"}]}, "0.tool_name"),
        ("chat", {"messages": [*MESSAGES, {"role": "user", "tool_name": "f"}]}, "messages.1.tool_"),
        ("chat", {"tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"template": "{{ .Prompt }}"}, "template"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"images": ["aGk="]}, "images"),
        ("generate", {"raw": True, "system": "x"}, "system"),
        ("generate", {"prompt": "a" * 600}, "prompt"),
        ("generate", {"colour": 1}, "colour"),
    ],
)
async def test_a_refusal_names_the_field(path: str, fields: dict[str, Any], named: str) -> None:
    engine = ScriptedEngine(TEXT)
    body = ({"messages": MESSAGES} if path == "chat" else {"prompt": "a"}) | fields
    reply = await post(f"http://test/api/{path}", body, engine)
    assert reply.status_code == 400, reply.text
    assert reply.json().keys() == {"error"}
    assert named in reply.json()["error"]
    assert not engine.requests


async def test_nothing_to_answer_is_a_load() -> None:
    engine = ScriptedEngine(TEXT)
    async with ollama_client(engine) as client:
        loaded = await client.generate("test/scripted")
        assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
        unloaded = await client.chat("test/scripted", [], keep_alive=0)
        assert (unloaded.done_reason, unloaded.message.content) == ("unload", "")
        with pytest.raises(ollama.ResponseError) as missing:
            await client.generate("another")
    assert missing.value.status_code == 404
    assert not engine.requests


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_a_load_tells_what_has_no_effect(path: str) -> None:
    asked = {"model": "test/scripted", "options": {"num_ctx": 8192}, "keep_alive": 60}
    reply = await post(f"http://test/api/{path}", asked, ScriptedEngine(TEXT))
    assert reply.json()["done_reason"] == "load"
    assert reply.headers["x-slipstream-ignored"] == "options.num_ctx, keep_alive"


async def test_formats_hold_the_text() -> None:
    schema = {"type": "object", "properties": {"zulu": {"type": "string"}}}
    engine = ScriptedEngine(TEXT)
    async with ollama_client(engine) as client:
        await client.chat("test/scripted", MESSAGES, format=schema)
        await client.generate("test/scripted", "a", format="json")
        await client.generate("test/scripted", "a", format=schema, raw=True)
    grammars = [each.sampling.grammar for each in engine.requests]
    assert ["zulu" in each for each in grammars] == [True, False, True]
    assert all(grammars)


async def test_thinking_is_switched_where_the_template_has_a_switch() -> None:
    engine = ScriptedEngine("<think>hm</think>yes")
    async with ollama_client(engine, byte_tokenizer(SWITCHED)) as client:
        silent = await client.chat("test/scripted", MESSAGES, think=False)
        assert silent.message.thinking is None
        assert prompt_of(engine).endswith("QUIET")
        aloud = await client.chat("test/scripted", MESSAGES, think=True)
        assert (aloud.message.thinking, aloud.message.content) == ("hm", "yes")
        told = await client.generate("test/scripted", "a", think="high")
        assert told.thinking == "hm"
        assert "effort high" in prompt_of(engine)
    async with ollama_client(ScriptedEngine(TEXT)) as client:
        reply = await client.chat("test/scripted", MESSAGES, think=False)
        assert reply.message.content == TEXT


async def test_a_level_that_the_template_does_not_read_is_refused() -> None:
    template = THINKING.replace("reasoning_effort", "other")
    async with ollama_client(ScriptedEngine(), byte_tokenizer(template)) as client:
        await client.chat("test/scripted", MESSAGES, think=True)
        with pytest.raises(ollama.ResponseError, match="think"):
            await client.chat("test/scripted", MESSAGES, think="low")


async def test_logprobs_come_with_their_pieces() -> None:
    async with ollama_client(ScriptedEngine(TEXT)) as client:
        whole = await client.chat("test/scripted", MESSAGES, logprobs=True, top_logprobs=2)
        stream = await client.generate("test/scripted", "a", raw=True, logprobs=True, stream=True)
        pieces = [one for each in [part async for part in stream] for one in each.logprobs or []]
    assert len(whole.logprobs) == len(pieces) == len(TEXT.encode())
    assert (whole.logprobs[0].token, whole.logprobs[0].logprob) == ("h", -0.5)
    assert len(whole.logprobs[0].top_logprobs or []) == 2


@pytest.mark.parametrize("padding", [0, LARGE])
async def test_a_body_is_json_whatever_it_is_called(padding: int) -> None:
    """``curl -d`` calls it a form."""
    engine = ScriptedEngine(TEXT, info=engine_info(max_model_len=100_000))
    headers = {"content-type": "application/x-www-form-urlencoded"}
    async with serve(engine, body_processes=0) as http:
        content = json.dumps({"model": "test/scripted", "prompt": "a" * (1 + padding)})
        reply = await http.post("http://test/api/generate", content=content, headers=headers)
        assert reply.status_code == 200, reply.text
        broken = await http.post("http://test/api/generate", content="{", headers=headers)
        assert broken.status_code == 400
        assert "not valid JSON" in broken.json()["error"]
        refused = await http.post("/completions", content=content, headers=headers)
        assert refused.status_code == 400


async def test_the_model_is_listed_shown_and_running() -> None:
    info = engine_info(architecture="llama", hidden_size=48, num_parameters=134_515_008)
    template = byte_tokenizer(THINKING)
    async with ollama_client(ScriptedEngine(info=info), template) as client:
        (listed,) = (await client.list()).models
        assert listed.model == "test/scripted:latest"
        assert listed.size == 4 * 134_515_008
        assert len(str(listed.digest)) == 64
        assert listed.details.parameter_size == "134.5M"
        assert listed.details.quantization_level == "F32"
        shown = await client.show("test/scripted")
        assert shown.template == THINKING
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo["llama.context_length"] == 512
        assert shown.modelinfo["llama.embedding_length"] == 48
        (running,) = (await client.ps()).models
        assert (running.name, running.context_length) == (listed.model, 512)
        assert running.size_vram == 0
        assert running.expires_at.year > 2300
        with pytest.raises(ollama.ResponseError) as missing:
            await client.show("another")
        assert missing.value.status_code == 404
    async with ollama_client(
        ScriptedEngine(), byte_tokenizer("{{ messages[0].content }}")
    ) as client:
        assert (await client.show("test/scripted")).capabilities == ["completion"]


async def test_adapters_are_listed_and_known_by_their_names() -> None:
    engine = ScriptedEngine(TEXT)
    async with ollama_client(engine, served_model_name="base") as client:
        await engine.load_adapter("mine", "/adapters/mine")
        for listed in ((await client.list()).models, (await client.ps()).models):
            assert [each.model for each in listed] == ["base:latest", "mine:latest"]
            assert len({each.digest for each in listed}) == 2
            parents = [each.details and each.details.parent_model for each in listed]
            assert parents == ["", "base:latest"]
        assert (await client.chat("mine:latest", MESSAGES)).model == "mine:latest"
        assert engine.requests[-1].adapter == "mine"
        assert (await client.generate("mine", "")).done_reason == "load"
        await client.show("mine")
        with pytest.raises(ollama.ResponseError):
            await client.chat("mine:2", MESSAGES)


@pytest.mark.parametrize(
    ("served", "listed", "known", "other"),
    [
        ("qwen", "qwen:latest", ["qwen", "qwen:latest"], "qwen:0.6b"),
        ("qwen:latest", "qwen:latest", ["qwen", "qwen:latest"], "other"),
        ("qwen:0.6b", "qwen:0.6b", ["qwen:0.6b"], "qwen"),
        # A model of the hub is meant with the hub's host as well.
        ("org/a:Q8_0", "org/a:Q8_0", ["org/a:Q8_0", "hf.co/org/a:Q8_0"], "hf.co/org/a"),
        ("org/a", "org/a:latest", ["org/a", "org/a:latest", "hf.co/org/a"], "a"),
        # A port is no tag.
        ("host:80/org/a", "host:80/org/a:latest", ["host:80/org/a"], "host:81/org/a"),
    ],
)
async def test_a_name_without_a_tag_has_the_latest(
    served: str, listed: str, known: list[str], other: str
) -> None:
    async with ollama_client(ScriptedEngine(TEXT), served_model_name=served) as client:
        assert [each.model for each in (await client.list()).models] == [listed]
        for name in known:
            assert (await client.chat(name, MESSAGES)).message.content == TEXT
        with pytest.raises(ollama.ResponseError):
            await client.chat(other, MESSAGES)


async def test_what_would_change_the_model_is_refused() -> None:
    async with ollama_client(ScriptedEngine()) as client:
        for change in (
            client.push("test/scripted"),
            client.create("mine", from_="test/scripted"),
            client.copy("test/scripted", "mine"),
            client.delete("test/scripted"),
        ):
            with pytest.raises(ollama.ResponseError, match="chosen at start") as refused:
                await change
            assert refused.value.status_code == 400


async def test_probes_find_a_server() -> None:
    async with serve(ScriptedEngine(), api_key="s3cret") as http:
        assert (await http.head("http://test/")).status_code == 200
        assert (await http.get("http://test/")).headers["content-type"].startswith("text/html")
        assert (await http.get("http://test/api/version")).status_code == 401
        key = {"Authorization": "Bearer s3cret"}
        version = await http.get("http://test/api/version", headers=key)
        assert version.json()["version"] == OLLAMA_VERSION
        assert (await http.head("http://test/api/tags", headers=key)).status_code == 200
        assert (await http.get("http://test/api/nothing", headers=key)).json().keys() == {"error"}
