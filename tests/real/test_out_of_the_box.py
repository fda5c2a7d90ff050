"""A first visitor's way, on weights that others trained: a chat, an edit, a schema, a tool call; by the
official client, in the browser and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from playwright.sync_api import Browser

from engine.tokenizer import load_tokenizer
from worlds.browser_visit import visit
from worlds.real_model import REAL
from worlds.served_command import HANG, Server
from worlds.terminal import UNDERLINED, terminal

pytestmark = REAL

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = "What is the capital of Japan?"
LETTER = (
    "Dear Ms Novak,\n\nThank you for you're letter of 3 March. We has received your order, and it will "
    "be send on Monday. If you have any questions, please write to us at any time.\n\nYours sincerely,\n"
    "Tom Baker"
)
CORRECT = f"Correct the grammar of this letter. Answer with the letter only.\n\n{LETTER}"


def an_object(**types: str) -> dict[str, Any]:
    """The schema of an object with all of these, and nothing else."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    closed = {"required": [*types], "additionalProperties": False}
    return {"type": "object", "properties": properties} | closed


WEATHER = {"name": "get_weather", "parameters": an_object(city="string")}
TOOL: Any = {"type": "function", "function": WEATHER}
SCHEMA = {"name": "person", "schema": an_object(name="string", age="integer", city="string")}
PERSON: Any = {"type": "json_schema", "json_schema": SCHEMA}


@pytest.fixture(scope="module")
def client(smollm2: Server) -> Iterator[OpenAI]:
    with smollm2.client() as found:
        yield found


def ask(client: OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        **{"max_tokens": 120, **fields},
    )


def test_it_says_what_it_serves(client: OpenAI) -> None:
    (card,) = client.models.list().data
    said: dict[str, Any] = card.model_dump()
    assert said["id"] == "smollm2"
    assert said["num_parameters"] == 134515008
    assert said["max_model_len"] == 8192
    assert said["has_chat_template"]
    assert said["determinism"] == "exact"
    assert said["exact_failed"] == []


def test_it_answers_a_question(client: OpenAI) -> None:
    reply = ask(client, QUESTION)
    assert reply.choices[0].message.content == "The capital of Japan is Tokyo."
    assert reply.choices[0].finish_reason == "stop"


def test_its_templates_system_prompt_is_told(client: OpenAI) -> None:
    named = ask(client, QUESTION).usage.prompt_tokens
    messages: Any = [{"role": "system", "content": ""}, {"role": "user", "content": QUESTION}]
    empty = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=1)
    assert empty.usage is not None
    own = load_tokenizer("smollm2").encode(SYSTEM)
    assert named - empty.usage.prompt_tokens == len(own)


def test_an_edit_takes_a_fraction_of_the_steps_and_not_another_text(client: OpenAI) -> None:
    """At a fixed depth, since what is granted by default hangs on what rows cost here and now."""
    prediction = {"prediction": {"type": "content", "content": LETTER}}
    fixed = {"adaptive_depth": False, "num_speculative_tokens": 8}
    drafted = ask(client, CORRECT, extra_body=prediction | {"speculative": fixed})
    by_default = ask(client, CORRECT, extra_body=prediction)
    plain = ask(client, CORRECT, extra_body={"speculative": {"draft_strategy": "none"}})
    text = drafted.choices[0].message.content
    assert text == plain.choices[0].message.content
    assert text == by_default.choices[0].message.content
    assert "Thank you for your letter of 3 March." in text
    assert "it will be sent on Monday" in text
    steps = [each.usage.model_dump()["speculative"]["num_steps"] for each in (drafted, plain)]
    assert 3 * steps[0] < steps[1]


def test_a_stream_is_the_text_with_drafted_tokens_marked(client: OpenAI) -> None:
    whole = ask(client, CORRECT).choices[0].message.content
    chunks = ask(client, CORRECT, stream=True, extra_body={"speculative": {"return_drafted": True}})
    pieces = [choice.model_dump() for chunk in chunks for choice in chunk.choices]
    assert "".join(each["delta"].get("content") or "" for each in pieces) == whole
    tokens = [token for each in pieces for token in each["tokens"]]
    assert "".join(token["text"] for token in tokens) == whole
    assert 0 < sum(token["drafted"] for token in tokens) < len(tokens)


def test_bytes_of_a_character_come_together(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "prompt": "Grüße 🙂 日本 🙂 日本 🙂 日本 🙂 日本",
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.completions.create(**asked).choices[0].text
    pieces = [
        choice.text
        for chunk in client.completions.create(**asked, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == whole
    assert not whole.isascii()
    # Only where the text is cut.
    assert "\ufffd" not in whole[:-1]


def test_a_schema_is_filled_in(client: OpenAI) -> None:
    text = "Alice Smith is 34 years old and lives in Paris. Extract name, age and city."
    reply = ask(client, text, response_format=PERSON)
    found = json.loads(reply.choices[0].message.content)
    assert found == {"name": "Alice Smith", "age": 34, "city": "Paris"}


def test_a_call_that_is_asked_for_is_written(client: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    reply = ask(client, "What is the weather in Cologne?", tools=[TOOL], tool_choice=named)
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Cologne"}


def test_results_of_calls_go_back_to_it(smollm2: Server) -> None:
    called = {"name": "get_weather", "arguments": '{"city": "Cologne"}'}
    call = {"id": "call_1", "type": "function", "function": called}
    messages = [
        {"role": "user", "content": "What is the weather in Cologne?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4 °C and rain"},
    ]
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 40, "temperature": 0}
    reply = httpx.post(f"{smollm2.url}/v1/chat/completions", json=body, timeout=HANG)
    assert reply.status_code == 200, reply.text
    assert "rain" in reply.json()["choices"][0]["message"]["content"]


# --- in front of a screen ---


def test_the_playground_shows_a_sensible_reply_with_its_drafts_marked(
    browser: Browser, smollm2: Server
) -> None:
    with visit(browser, smollm2.url) as page:
        page.load()
        names = page.page.locator("#example option").all_text_contents()
        assert names[:2] == ["Edit: correct a letter", "Chat: a question, sampled"]
        page.run()
        text = page.text("drafted")
        assert "it will be sent on Monday" in text
        assert text == page.text("plain")
        marked = "".join(page.page.locator("#drafted .text .drafted").all_text_contents())
        assert 0 < len(marked) < len(text)
        assert int(page.figure("drafted", "Steps")) < int(page.figure("plain", "Steps"))
        assert page.verdict().startswith("The two texts are equal, all ")


def test_the_terminal_shows_a_reply_with_its_drafts_underlined(smollm2: Server) -> None:
    with terminal(
        *("chat", "--url", smollm2.url, "--temperature", "0", "--max-tokens", "80")
    ) as shown:
        shown.read_until("/help lists the commands")
        shown.type(f"{QUESTION} Answer in the words of the question.\r")
        shown.read_until("drafts accepted")
        shown.type("/quit\r")
        assert shown.read_to_end() == 0
    assert "Tokyo" in shown.seen
    assert UNDERLINED.findall(shown.seen)
