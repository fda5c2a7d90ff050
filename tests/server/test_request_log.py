"""The log has a line for each request, with its figures and without its text."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.logs import JsonLines
from engine.request.errors import RequestFailedError
from server.metrics import finished
from slipstream.client.warm import read_lessons
from slipstream.tools.replay.log import read_log
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import serve, until


class Lines(logging.Handler):
    """Takes lines down as they would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def of(self, logger: str) -> list[dict[str, Any]]:
        found = [json.loads(text) for text in self.texts]
        return [each for each in found if each["logger"] == logger]


@pytest.fixture
def lines() -> Any:
    handler, root = Lines(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


async def load(client: httpx.AsyncClient, name: str) -> None:
    """Loads an adapter as the operator does."""
    headers = {"authorization": "Bearer adm1n"}
    body = {"name": name, "path": f"/adapters/{name}"}
    await client.post("http://test/admin/lora", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_requests_line_has_its_ids_and_figures(lines: Lines, stream: bool) -> None:
    async with serve(ScriptedEngine("abc"), log_client_fields=True) as client:
        body = {"prompt": "a", "user": "line\nbreak", "stream": stream, "n": 2}
        body |= {"metadata": {"job": "a\nb"}}
        for name in ("abc-1", 'x" level="error'):
            await client.post("/completions", json=body, headers={"x-request-id": name})
    line, other = lines.of("slipstream.requests")
    assert line["x_request_id"] == "abc-1"
    assert other["x_request_id"].isalnum()
    assert line["user"] == "line\nbreak"
    assert line["metadata"] == {"job": "a\nb"}
    assert line["message"].startswith(f"{line['request_id']} x-request-id=abc-1 user=")
    assert " prompt=1 completion=6 finish=stop,stop " in line["message"]
    expected = {
        "prompt_tokens": 1,
        "completion_tokens": 6,
        "cached_tokens": 3,
        "finish_reasons": ["stop", "stop"],
        "drafter": "ngram",
        "num_draft_tokens": 20,
        "num_accepted_tokens": 14,
        "queue_seconds": 0.01,
        "time_to_first_token_seconds": 0.02,
        "e2e_seconds": 0.12,
    }
    assert {name: line[name] for name in expected} == expected


async def test_a_fault_is_logged_under_its_request(lines: Lines) -> None:
    engine = ScriptedEngine("abc")
    engine.break_after, engine.error = 0, RequestFailedError("it broke")
    async with serve(engine) as client:
        for number in ("one", "two"):
            headers = {"x-request-id": number}
            reply = await client.post("/completions", json={"prompt": "a"}, headers=headers)
            assert reply.status_code == 500
    assert [each["x_request_id"] for each in lines.of("server.errors")] == ["one", "two"]
    assert all("request_id" in each for each in lines.of("server.errors"))


async def test_no_text_and_no_key_is_logged_at_any_level(lines: Lines) -> None:
    keys = {"api_key": "the-api-key", "admin_key": "the-admin-key"}
    async with serve(ScriptedEngine("the-written-text"), **keys) as client:
        for key in (*keys.values(), "the-wrong-key"):
            client.headers["authorization"] = f"Bearer {key}"
            for body in ({"prompt": "the-prompt-text"}, {"prompt": "the-prompt-text", "n": -1}):
                await client.post("/completions", json=body)
            change = {"defaults": {"num_speculative_tokens": 3}}
            await client.patch("http://test/admin/speculative", json=change)
    said = "\n".join(lines.texts)
    assert lines.of("slipstream.requests")
    assert lines.of("slipstream.admin")
    for secret in ("the-api", "the-admin", "the-wrong", "the-prompt", "the-written"):
        assert secret not in said


CHAT = {"messages": [{"role": "user", "content": "a"}]}
NAMES = {"user": "ada-1", "metadata": {"user_id": "ada-2"}}
MORE_NAMES = {"safety_identifier": "ada-3", "prompt_cache_key": "ada-4"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"prompt": "a", **MORE_NAMES}),
        ("/chat/completions", CHAT | MORE_NAMES),
        ("/messages", CHAT | {"max_tokens": 4}),
        ("/responses", {"input": "a", **MORE_NAMES}),
    ],
)
async def test_fields_that_may_name_people_are_logged_only_where_that_is_asked_for(
    lines: Lines, path: str, body: dict[str, Any]
) -> None:
    for asked in (False, True):
        async with serve(ScriptedEngine("abc"), log_client_fields=asked) as client:
            assert (await client.post(path, json=NAMES | body)).is_success
        said = "".join(lines.texts)
        for name in re.findall(r"ada-\d", str(NAMES | body)):
            assert (name in said) is asked


async def test_a_line_names_tenant_and_adapter_and_no_key(lines: Lines, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: [{name: somebody, key: the-tenants-key}]")
    async with serve(ScriptedEngine("abc"), api_keys_file=str(file), admin_key="adm1n") as client:
        await load(client, "mine")
        client.headers["authorization"] = "Bearer the-tenants-key"
        for model in (None, "mine"):
            await client.post("/completions", json={"prompt": "a", "model": model})
    found = lines.of("slipstream.requests")
    told = [(each["tenant"], each.get("adapter")) for each in found]
    assert told == [("somebody", None), ("somebody", "mine")]
    assert "the-tenants-key" not in "".join(lines.texts)


async def test_finished_requests_are_written_down_for_warm_and_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and streamed, cut at a stop string, by tenant; of adapters and of what failed nothing."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: a, key: k-a}, {name: b, key: k-b}]")
    files = [tmp_path / f"log.{name}.jsonl" for name in "ab"]
    files[0].touch(0o644)
    engine = ScriptedEngine("abc")
    settings = {"api_keys_file": str(keys), "request_log": str(tmp_path / "log.jsonl")}
    async with serve(engine, admin_key="adm1n", **settings) as client:
        await load(client, "mine")
        chat = {"messages": [{"role": "user", "content": "q"}]}
        for key, path, fields in (
            ("a", "/completions", {"prompt": "mine", "model": "mine"}),
            ("a", "/completions", {"prompt": "p", "n": 2, "cache_salt": "s"}),
            ("a", "/completions", {"prompt": "p", "stop": "c", "stream": True}),
            ("b", "/messages", chat | {"max_tokens": 9}),
        ):
            headers = {"authorization": f"Bearer k-{key}"}
            assert (await client.post(path, json=fields, headers=headers)).is_success
        engine.break_after, engine.error = 0, RequestFailedError("it broke")
        await client.post("/completions", json={"prompt": "p"}, headers=headers)
        await until(lambda: files[1].exists() and files[1].read_text().count("\n") == 1)
        monkeypatch.setattr(finished, "MOST_BYTES", files[1].stat().st_size)
        engine.break_after = None
        await client.post("/completions", json={"prompt": "p"}, headers=headers)
        await until(lambda: not files[1].exists())
    lines = [json.loads(each) for each in files[0].read_text().splitlines()]
    assert [each["completion"] for each in lines] == [[97, 98, 99], [97, 98, 99], [97, 98]]
    assert [each["prompt"] for each in lines] == [[112]] * 3
    assert [each.get("cache_salt") for each in lines] == ["s", "s", None]
    assert [each.cache_salt for each in read_log(files[0], byte_tokenizer)] == ["s", "s", ""]
    assert [each.path for each in read_lessons(files[0], 9)] == ["/v1/completions"] * 3
    kept = Path(f"{files[1]}.1")
    assert len(read_lessons(kept, 9)) == 2
    assert {each.stat().st_mode & 0o777 for each in (files[0], kept)} == {0o600}
