"""The whole path on real input: official client, HTTP, engine, bundled model, drafts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from slipstream.cli import main
from worlds.client_servers import WAIT_SECONDS
from worlds.engine_servers import Served

pytestmark = pytest.mark.slow

CODE = '''def load_table(path, separator=","):
    """Read a table of numbers."""
    rows = []
    with open(path) as stream:
        for line in stream:
            parts = line.strip().split(separator)
            if not parts:
                continue
            rows.append([float(part) for part in parts])
    return rows
'''
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
EDIT = [{"role": "user", "content": f"Rename the variable `rows` to `table`.\n\n{CODE}"}]
# Grants that know no clock: what is accepted is a function of the text, however busy the machine is.
FIXED = {"adaptive_depth": "fixed"}
DRAFT = {"speculative": {"draft_strategy": "ngram"} | FIXED}
NASD = {"draft_strategy": "nasd"}
PLAIN = {"speculative": {"draft_strategy": "none"}}


def complete(served: Served, **asked: Any) -> Any:
    return served.client().completions.create(model="slipstream-bundled", **asked)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}])
def test_an_edit_streams_the_same_text_with_and_without_drafts(
    served: Served, sampling: dict[str, Any]
) -> None:
    client = served.client()
    texts, usages = [], []
    for extra in (PLAIN, DRAFT):
        asked: Any = {"model": "slipstream-bundled", "messages": EDIT, "max_tokens": 96, "seed": 5}
        asked |= {"stream": True, "stream_options": {"include_usage": True}, **sampling}
        chunks = list(client.chat.completions.create(**asked, extra_body=extra))
        texts.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
        usages.append(chunks[-1].usage)
    assert texts[0]
    assert texts[0] == texts[1]
    plain, drafted = (usage.model_extra["speculative"] for usage in usages)
    assert plain["num_draft_tokens"] == 0
    assert drafted["num_accepted_tokens"] > 0
    assert drafted["num_steps"] < plain["num_steps"]
    assert usages[0].completion_tokens == usages[1].completion_tokens


@pytest.mark.parametrize(
    "shape",
    [
        {"adaptive_depth": False, "num_speculative_tokens": 5},
        {"adaptive_depth": False, "tree_strategy": "tree", "tree_width": 2, "tree_depth": 5},
    ],
)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}])
def test_the_bundled_draft_model_drafts_what_the_target_then_writes(
    served: Served, sampling: dict[str, Any], shape: dict[str, Any]
) -> None:
    drafts = (PLAIN["speculative"], {"draft_strategy": "small_model"} | shape)
    extras = ({"ignore_eos": True, "speculative": each} for each in drafts)
    asked: Any = {"prompt": CODE, "max_tokens": 64, **sampling}
    replies = [complete(served, extra_body=each, **asked) for each in extras]
    assert replies[0].choices[0].text == replies[1].choices[0].text
    account = replies[1].usage.model_extra["speculative"]
    assert account["tokens_per_step"] > 1.5
    assert account["acceptance_rate"] > 0.15


def test_requests_side_by_side_write_what_they_write_alone(served: Served) -> None:
    """Different drafters, shapes and samplings share the batch; nobody's text may move."""
    tree = {"tree_strategy": "tree", "tree_width": 3, "tree_depth": 4, "adaptive_depth": False}
    bodies: list[dict[str, Any]] = [
        {"temperature": 0, "extra_body": DRAFT},
        {"temperature": 0.8, "seed": 1, "extra_body": {"speculative": NASD}},
        {"temperature": 1.0, "seed": 2, "extra_body": {"speculative": NASD | tree}},
        {"temperature": 0.6, "seed": 3, "extra_body": PLAIN},
    ]

    async def write(client: AsyncOpenAI, body: dict[str, Any]) -> str:
        reply = await client.completions.create(
            model="slipstream-bundled", prompt=CODE[:200], max_tokens=48, **body
        )
        return reply.choices[0].text

    async def run() -> tuple[list[str], list[str]]:
        url = f"{served.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            alone = [await write(client, body) for body in bodies]
            together = await asyncio.gather(*(write(client, body) for body in bodies))
        return alone, list(together)

    alone, together = asyncio.run(run())
    assert alone == together


def test_a_client_that_leaves_frees_its_blocks_within_a_step(served: Served) -> None:
    served.until(has_work=False)
    body = {
        "model": "slipstream-bundled",
        "prompt": CODE,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        # Long work: all would be written before a client leaves that a busy machine holds up. So there
        # are several choices, and no drafts, which repeat what a small model repeats.
        "n": 64,
        "speculative": {"draft_strategy": "none"},
    }
    with (
        httpx.Client(timeout=WAIT_SECONDS) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body) as reply,
    ):
        next(reply.iter_lines())
    served.until(has_work=False)
    counts = served.pool.counts()
    assert counts["committed"] == counts["draft"] == 0
    served.pool.check_integrity()


def test_log_probabilities_cover_choices_that_differ_and_the_prompt(served: Served) -> None:
    asked: Any = {"prompt": CODE * 2, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    choices = complete(served, **asked, n=3, logprobs=2, seed=11).choices
    assert len({choice.text for choice in choices}) > 1
    reply = complete(served, prompt="import os\n", logprobs=2, echo=True, max_tokens=3)
    (echoed,) = reply.choices
    assert echoed.text.startswith("import os\n")
    for choice in [*choices, echoed]:
        # Logprobs name special tokens, the text leaves them out.
        tokens = [each for each in choice.logprobs.tokens or [] if each not in SPECIAL]
        assert "".join(tokens) == choice.text
        first, *values = choice.logprobs.token_logprobs or []
        assert (first is None) == (choice is echoed)
        assert all(value is not None and value <= 0 for value in values)


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "EET", "UTC"]}, "summer": {"type": "boolean"}},
    "required": ["zone", "summer"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_calls_are_valid_drafted_and_the_same_without_drafts(
    served: Served, choice: Any, temperature: float
) -> None:
    asked: dict[str, Any] = {
        "model": "slipstream-bundled",
        "messages": [{"role": "user", "content": "The weather in Cologne, and the time there?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": temperature,
        "max_tokens": 160,
        "seed": 4,
    }
    client = served.client()
    found: dict[str, list[tuple[str, str]]] = {}
    num_steps: dict[str, int] = {}
    for drafter in ("none", "grammar", "ngram"):
        grants = {} if drafter == "none" else FIXED | {"num_speculative_tokens": 16}
        extra = {"speculative": {"draft_strategy": drafter} | grants}
        reply = client.chat.completions.create(**asked, extra_body=extra)
        (one,) = reply.choices
        found[drafter] = calls_of(one.message)
        num_steps[drafter] = reply.usage.model_extra["speculative"]["num_steps"]
        # One that was cut off is the beginning of a valid one.
        whole = found[drafter][: -1 if one.finish_reason == "length" else None]
        assert whole
        for name, arguments in whole:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if choice == NAMED:
            assert [name for name, _ in found[drafter]] == ["get_time"]
    assert found["grammar"] == found["ngram"] == found["none"]
    assert max(num_steps["grammar"], num_steps["ngram"]) < 0.6 * num_steps["none"]
    with client.chat.completions.stream(**asked, extra_body=DRAFT) as stream:
        for _ in stream:
            pass
    joined = stream.get_final_completion().choices[0].message
    assert calls_of(joined) == found["none"]


def test_calls_and_what_came_of_them_are_shown_to_the_model(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    with httpx.Client(base_url=served.url, timeout=WAIT_SECONDS) as client:
        reply = client.post("/tokenize", json={"messages": messages, "tools": TOOLS})
        back = client.post("/detokenize", json={"tokens": reply.json()["tokens"]})
    text = back.json()["prompt"]
    assert text.startswith("<|bos|><|system|>Be brief.\nFunctions:\n{")
    assert text.count("<|system|>") == text.count("Be brief.") == 1
    assert '<|assistant|>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>' in text
    assert text.endswith("<|user|>noon<|eos|><|assistant|>")


def test_a_warmed_drafter_copies_from_the_log(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(salt: str) -> Any:
        body = {"cache_salt": salt, "speculative": {"draft_strategy": "suffix"} | FIXED}
        asked: Any = {"prompt": "def parse(line):\n", "temperature": 0.9, "extra_body": body}
        return complete(served, **asked, max_tokens=64, seed=11)

    def accepted(reply: Any) -> int:
        return reply.usage.model_extra["speculative"]["num_accepted_tokens"]

    cold = ask("cold")
    log = tmp_path / "log.jsonl"
    line = {"prompt": "def parse(line):\n", "completion": cold.choices[0].text}
    log.write_text(json.dumps(line | {"cache_salt": "warm"}), encoding="utf-8")
    monkeypatch.setenv("SLIPSTREAM_URL", served.url)
    assert main(["warm", str(log)]) == 0
    warm, other = ask("warm"), ask("other")
    assert warm.choices[0].text == other.choices[0].text == cold.choices[0].text
    assert accepted(warm) > accepted(cold) + 20
    # What was taught under one salt is nobody else's.
    assert accepted(other) == accepted(cold)
