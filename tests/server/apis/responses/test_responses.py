"""``/v1/responses``: items in, items out, and the events in which they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.request.params import GenerationRequest
from server.plan import IGNORED_HEADER
from server.request.large_bodies import LARGE
from worlds.official_clients import openai_client
from worlds.request_bodies import CALL, TOOLS
from worlds.scripted_engine import (
    ASSISTANT,
    THINKING,
    USER,
    ScriptedEngine,
    byte_tokenizer,
    engine_info,
    prompt_text,
)
from worlds.serving import fault, named_events, post, serve

TEXT = "hello wörld"
TOOL: Any = {"type": "function", **TOOLS[0]["function"], "strict": False}


async def test_the_openai_client_gets_a_response() -> None:
    engine = ScriptedEngine(TEXT)
    async with openai_client(engine) as client:
        response = await client.responses.create(
            model="test/scripted",
            instructions="be brief",
            input="hi",
            metadata={"a": "b"},
            temperature=0.5,
            top_p=0.5,
            store=False,
        )
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.instructions == "be brief"
    assert response.metadata == {"a": "b"}
    assert (response.temperature, response.top_p) == (0.5, 0.5)
    assert response.usage.output_tokens == len(TEXT.encode())
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.5)
    expected = [USER, *b"system: be brief\n", USER, *b"user: hi\n", ASSISTANT]
    assert list(request.prompt_token_ids) == expected


async def test_the_openai_client_streams_a_response() -> None:
    text = f"<think>hm</think>Look.\n{CALL}\n{CALL}"
    async with serve(ScriptedEngine(text), byte_tokenizer(THINKING)) as http:
        body = {"input": "hi", "tools": [TOOL], "seed": 1}
        whole = (await http.post("/responses", json=body)).json()
        streamed = await http.post("/responses", json=body | {"stream": True})
    events = named_events(streamed.text)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    added, done = ("output_item.added", "content_part.added"), ("content_part.done", call[-1])
    assert order == [
        *("created", "in_progress"),
        *(*added, "reasoning_text.delta", "reasoning_text.done", *done),
        *(*added, "output_text.delta", "output_text.done", *done),
        *(*call, *call, "completed"),
    ]
    response = events[-1]["response"]
    items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert items == response["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2]
    assert [item["status"] for item in items] == ["completed"] * 4
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 17}
    # The same as whole, but for what belongs to one request.
    for each in (whole, response):
        for item in each["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert whole["output"] == response["output"]


async def test_a_response_without_a_text_has_an_empty_one() -> None:
    empty = (await post("/responses", {"input": "hi"}, ScriptedEngine(""))).json()
    assert empty["output"][0]["content"][0]["text"] == ""


async def test_what_a_failed_response_leaves_is_incomplete() -> None:
    engine = ScriptedEngine(TEXT)
    engine.break_after = 2
    reply = await post("/responses", {"input": "hi", "stream": True}, engine)
    *_, last = named_events(reply.text)
    assert last["response"]["status"] == "failed"
    (item,) = last["response"]["output"]
    assert item["content"][0]["text"] == TEXT[:4]
    assert item["status"] == "incomplete"


async def test_formats_tools_and_effort_are_repeated() -> None:
    schema = {"type": "object", "properties": {"zulu": {"type": "string"}}}
    fields: dict[str, Any] = {
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "reasoning": {"effort": "low"},
    }
    engine = ScriptedEngine(TEXT)
    async with serve(engine) as client:
        for names in (["text"], ["tools", "tool_choice"], ["reasoning"]):
            given = {name: fields[name] for name in names}
            reply = (await client.post("/responses", json={"input": "hi", **given})).json()
            for name, value in given.items():
                assert reply[name] == value or reply[name].items() >= value.items()
    assert "get_weather" in engine.requests[1].sampling.grammar


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
TARGET = {"type": "object", "properties": {"target": {"type": "string"}}}
CODEX: dict[str, Any] = {
    # What codex exec 0.171.0 sends, shortened.
    "model": "test/scripted",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_01a2", "role": "developer", "content": "You are .."},
        {"type": "message", "id": "msg_01a3", "role": "user", "content": "Close it and patch."},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": TARGET},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Sub-agents.",
            "tools": [{"type": "function", "name": "close_agent", "parameters": TARGET}],
        },
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR},
        {"type": "tool_search", "execution": "client", "parameters": TARGET},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2191e",
}
PATCH = '*** Begin Patch\n+"w\u00f6rld" \\d\n'


async def test_codex_gets_calls_in_its_own_terms_and_sends_them_back() -> None:
    calls = [("multi_agent_v1__close_agent", {"target": "a"}), ("apply_patch", {"input": PATCH})]
    texts = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    text = "<think>hm</think>I do.\n" + "\n".join(
        f"<tool_call>\n{each}\n</tool_call>" for each in texts
    )
    engine = ScriptedEngine(text, info=engine_info(max_model_len=2000))
    own = {"extra_body": {"client_metadata": {"turn_id": "01a2191e"}}}
    template = THINKING.replace("{{ message['role'] }}", "[{{ message.reasoning_content }}]")
    async with openai_client(engine, tokenizer=byte_tokenizer(template)) as client:
        events = [each async for each in await client.responses.create(**CODEX, **own)]
        response: Any = events[-1].response
        _, _, close, patch = response.output
        answers: list[Any] = [
            {"type": "function_call_output", "call_id": close.call_id, "output": "not found"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "patched"},
        ]
        items = [each.model_dump(exclude_none=True) for each in response.output]
        again = CODEX | {"input": [*CODEX["input"], *items, *answers]}
        raw = await client.responses.with_raw_response.create(**again, **own)
    of_close = (close.type, close.namespace, close.name)
    assert of_close == ("function_call", "multi_agent_v1", "close_agent")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert patch.id.startswith("ctc_")
    inputs = [each for each in events if each.type.startswith("response.custom_tool_call_input")]
    assert "".join(each.delta for each in inputs[:-1]) == inputs[-1].input == PATCH
    assert {(each.item_id, each.output_index) for each in inputs} == {(patch.id, 3)}
    for each in events:  # is one of the client's own, and has the fields that its type has to have
        if not hasattr(each, "response"):
            type(each).model_validate(each.to_dict())
    assert set(raw.headers[IGNORED_HEADER].split(", ")) == {
        "tools.format.syntax",
        "reasoning.summary",
        "include",
        "client_metadata",
        "tools.tool_search",
        "tools.web_search",
    }
    first, second = map(prompt_of, engine.requests)
    assert '"description": "Sub-agents."' in first
    assert "Begin Patch" in first
    assert "web_search" not in first + second
    for name, given in calls:
        shown = json.dumps(given, ensure_ascii=False)
        assert f'{{"name": "{name}", "arguments": {shown}}}' in second
    assert "|[hm]: I do.<tool_call>" in second
    assert second.endswith("|[]: not found\n|[]: patched\n|")


def prompt_of(request: GenerationRequest) -> str:
    return prompt_text(request, "|")


@pytest.mark.parametrize(
    ("items", "shown", "told"),
    [
        ([{"type": "web_search_call", "id": "ws_1", "action": {}}], "", "input.web_search_call"),
        ([{"type": "compaction", "encrypted_content": "x"}], "", "input.compaction"),
        (
            [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
            "",
            "input.encrypted_content",
        ),
        (
            [{"role": "assistant", "content": "Yes.", "phase": "x"}],
            "|assistant: Yes.\n",
            "input.phase",
        ),
        (
            [
                {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
            ],
            '|assistant: <tool_call>{"name": "local_shell", "arguments": {"action": {"command": '
            '["ls"]}}}</tool_call>\n'
            "|tool: a.txt\n",
            None,
        ),
        (
            [
                {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}},
                {"type": "tool_search_output", "call_id": "c", "tools": [], "status": "completed"},
            ],
            '|assistant: <tool_call>{"name": "tool_search", "arguments": {"arguments": '
            '{"query": "q"}}}</tool_call>\n|tool: {"tools": []}\n',
            None,
        ),
    ],
)
@pytest.mark.parametrize("unknown_fields", ["reject", "tell"])
async def test_items_of_other_servers_are_shown_or_told(
    items: list[Any], shown: str, told: str | None, unknown_fields: str
) -> None:
    engine = ScriptedEngine(TEXT)
    body = {"input": [*items, {"role": "user", "content": "go on"}]}
    reply = await post("/responses", body, engine, unknown_fields=unknown_fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get(IGNORED_HEADER) == told
    assert prompt_of(engine.requests[0]) == f"{shown}|user: go on\n|"


async def test_a_custom_tool_is_held_to_its_expression_and_allowed_ones_alone_are_shown() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{2}zulu"}
    tool = {"type": "custom", "name": "pick", "format": form}
    named = {"type": "custom", "name": "pick"}
    text = '<tool_call>{"name": "pick", "arguments": {"input": "abzul'
    engine = ScriptedEngine(text, info=engine_info(max_model_len=2000))
    async with serve(engine) as client:
        for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
            body = {"input": "hi", "tools": [TOOL, tool], "tool_choice": choice}
            reply = (await client.post("/responses", json=body)).json()
            assert reply["tool_choice"].items() >= choice.items()
            (call,) = reply["output"]
            assert (call["type"], call["input"]) == ("custom_tool_call", "abzul")
    assert all("zulu" in each.sampling.grammar for each in engine.requests)
    assert ["get_weather" in prompt_of(each) for each in engine.requests] == [True, False]


async def test_a_conversation_goes_on_from_a_response_of_ones_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: a, key: ka}, {name: b, key: kb}]")
    engine = ScriptedEngine(TEXT, info=engine_info(max_model_len=60_000))
    settings = {"api_keys_file": str(keys), "stored_response_bytes": 120_000}
    async with serve(engine, **settings) as client:

        async def ask(key: str, path: str = "", method: str = "POST", **body: Any) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            given = {"json": body} if body else {}
            return await client.request(method, f"/responses{path}", headers=headers, **given)

        first = (await ask("ka", input="one " + "x" * LARGE, instructions="be brief")).json()
        on = {"input": "two", "previous_response_id": first["id"]}
        second = (await ask("ka", stream=True, **on)).text
        second = named_events(second)[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        reference = {"type": "item_reference", "id": second["output"][0]["id"]}
        third = await ask("ka", input=[reference, {"role": "user", "content": "z" * LARGE}])
        assert third.status_code == 200, third.text
        counted = await ask("ka", "/input_tokens", input="three", previous_response_id=second["id"])
        texts = [*map(prompt_of, engine.requests)]
        assert texts[1].endswith(f"x\n|assistant: {TEXT}\n|user: two\n|")
        assert texts[2].startswith(f"|assistant: {TEXT}\n|user: zz")
        more = len(f"|assistant: {TEXT}\n|user: three\n".encode())
        assert counted.json()["input_tokens"] == len(texts[1].encode()) + more
        assert "be brief" not in texts[1]
        place = f"/{first['id']}"
        assert (await ask("ka", place, "GET")).json() == first
        assert fault(await ask("ka", f"{place}?stream=true", "GET"), "param") == (400, "stream")
        lost = [await ask("kb", **on), await ask("ka", **on | {"previous_response_id": "resp_1"})]
        unkept = (await ask("ka", input="hi", store=False)).json()
        lost.append(await ask("ka", **on | {"previous_response_id": unkept["id"]}))
        for each in lost:
            assert fault(each) == (400, "previous_response_not_found")
        assert (await ask("kb", place, "GET")).status_code == 404
        assert (await ask("kb", place, "DELETE")).status_code == 404
        assert fault(await ask("kb", input=[reference])) == (404, "item_not_found")
        # The tenant with most bytes loses its oldest, and nobody else does.
        kept = (await ask("kb", input="mine")).json()
        for _ in range(4):
            await ask("ka", input="y" * (LARGE + 9_000))
        assert (await ask("ka", place, "GET")).status_code == 404
        assert (await ask("kb", f"/{kept['id']}", "DELETE")).json()["deleted"] is True
        assert (await ask("kb", f"/{kept['id']}", "GET")).status_code == 404
