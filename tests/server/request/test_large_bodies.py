"""Large bodies: read elsewhere, with the same outcome, while everything else goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import ApiError
from server.request.large_bodies import LARGE, BodyReader, default_body_bytes
from worlds import deadly_bodies
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import as_json, endless, fault, serve, until

ROOT = Path(__file__).resolve().parents[3]
PADDING = " " * LARGE
CHAT = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
COMPLETION = {"prompt": "hi", "seed": 1}
JSON = {"content-type": "application/json"}
PADDED = as_json(COMPLETION, LARGE)
HOSTILE = json.dumps({"prompt": [{}] * 1_900_000}).encode()


def outcome(reply: httpx.Response) -> tuple[int, Any]:
    data = reply.json()
    for each in (data, *data.get("output", [])):
        for changing in ("id", "created", "created_at"):
            each.pop(changing, None)
    return reply.status_code, data


async def test_a_large_body_has_the_outcome_of_a_small_one() -> None:
    bodies: list[tuple[str, bytes]] = [
        ("completions", json.dumps(COMPLETION).encode()),
        ("completions", json.dumps(COMPLETION | {"n": 3, "stop": "w", "top_k": 3}).encode()),
        ("chat/completions", json.dumps(CHAT).encode()),
        ("chat/completions", json.dumps(CHAT | {"messages": []}).encode()),
        ("chat/completions", json.dumps(CHAT | {"functions": [1], "n": 0}).encode()),
        ("completions", json.dumps(COMPLETION | {"model": "other"}).encode()),
        ("completions", json.dumps(COMPLETION | {"prompt": [1, 5000]}).encode()),
        ("completions", json.dumps(COMPLETION | {"speculative": {"tree_depth": -1}}).encode()),
        ("completions", json.dumps(COMPLETION | {"logit_bias": {"x": 1}}).encode()),
        ("responses", json.dumps({"input": "hi", "seed": 1, "metadata": {"a": "b"}}).encode()),
        ("responses", json.dumps({"input": "hi", "max_output_tokens": 0}).encode()),
        ("completions", b'{"prompt": "a",\n oops}'),
        ("completions", b'{"prompt": "a\\ud83d"}'),
        ("completions", b'{"n": 1' + b"1" * 5000 + b"}"),
        ("completions", b'{"prompt": "\xff"}'),
        ("completions", b"[1, 2]"),
        ("completions", b"null"),
        ("completions", b"[" * 100_000),
    ]
    engine = ScriptedEngine()
    async with serve(engine) as client:
        for path, body in bodies:
            for kind in ("application/json", "application/problem+json", "text/plain"):
                headers = {"content-type": kind}
                small = await client.post(path, content=body, headers=headers)
                large = await client.post(path, content=body + PADDING.encode(), headers=headers)
                assert outcome(large) == outcome(small)
        rejected = (await client.get("http://test/metrics")).text
    written = [each for each in engine.requests if each.sampling.choice_index == 0]
    assert {each.prompt_token_ids for each in written[:4]} == {tuple(b"hi")}
    assert all(each.arrival_time > 0 for each in written)
    assert 'slipstream_rejections_total{reason="model_not_found"} 4.0' in rejected


@pytest.mark.parametrize("body", ["hostile", "prompt"])
async def test_other_requests_go_on_while_a_body_is_read(body: str) -> None:
    engine = endless()
    content = HOSTILE
    if body == "prompt":
        content = json.dumps({"prompt": ["a b " * 20] * 88_000}).encode()
    async with serve(engine, max_body_bytes=8 << 20) as client:
        # The pool is there when the time comes.
        await client.post("completions", **PADDED)
        before = engine.num_events
        reading = asyncio.create_task(
            client.post("completions", content=content, headers=JSON, timeout=120)
        )
        finished = 0
        while not reading.done():
            reply = await client.post("completions", json=COMPLETION | {"max_tokens": 50})
            assert reply.status_code == 200
            finished += 1
        assert (await reading).status_code == 400
    assert finished >= 3
    assert engine.num_events >= before + 50 * finished


async def test_a_process_that_was_killed_costs_nobody_an_error() -> None:
    async with serve(ScriptedEngine(), max_body_bytes=8 << 20) as client:
        assert (await client.post("completions", **PADDED)).is_success
        reader = client.app.state.models.only.bodies  # type: ignore[attr-defined]
        pool = reader._pool
        (pid,) = pool._processes
        reading = asyncio.create_task(
            client.post("completions", content=HOSTILE, headers=JSON, timeout=120)
        )
        await until(lambda: pool._pending_work_items)
        os.kill(pid, signal.SIGKILL)
        # What is wrong with it, found by the next process.
        assert fault(await reading, "param") == (400, "prompt")
        assert (await client.post("completions", json=COMPLETION)).is_success
        assert (await client.post("completions", **PADDED)).is_success


async def test_a_body_that_ends_its_process_is_refused_and_its_neighbours_are_read(
    tmp_path: Path,
) -> None:
    reader: Any = BodyReader(deadly_bodies.Translator(), 2)  # type: ignore[arg-type]
    try:
        waiting = asyncio.create_task(
            reader.read(deadly_bodies.body(f"{tmp_path}"), deadly_bodies.read)
        )
        await until((tmp_path / "begun").exists)
        with pytest.raises(ApiError) as refused:
            await reader.read(deadly_bodies.body("deadly"), deadly_bodies.read)
        assert (refused.value.status, refused.value.code) == (400, "unreadable_body")
        assert await waiting == (f"{tmp_path}", False)
        assert await reader.read(deadly_bodies.body("more"), deadly_bodies.read) == ("more", False)
        processes = list(reader._pool_processes.begun)
        # One that is not known would be waited for at the interpreter's end, for ever.
        assert set(processes) >= set(reader._pool._processes.values())
        thread = reader._pool._executor_manager_thread
    finally:
        reader.close()
    assert not thread.is_alive()
    # The pool's own thread waits for them, too: who comes second may not be told that they ended.
    await until(lambda: not any(_runs(each.pid) for each in processes))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_where_no_process_begins_the_server_reads_bodies_itself() -> None:
    reader: Any = BodyReader(deadly_bodies.Translator(fails_to_begin=True), 1)  # type: ignore[arg-type]
    try:
        for prompt in ("one", "two"):
            found = await reader.read(deadly_bodies.body(prompt), deadly_bodies.read)
            assert found == (prompt, True)
    finally:
        reader.close()


READER = """
import multiprocessing, os, signal
from server.request.large_bodies import BodyReader

def nothing(): ...

if __name__ == "__main__":
    reader = BodyReader(nothing, 1)
    reader.warm()
"""
KILLED = """
    locks = reader._pool._call_queue
    print(locks._rlock._semlock.name, locks._sem._semlock.name, flush=True)
    reader._pool.submit(os.getpid).result()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def ended(folder: Path, code: str, warnings: str = "") -> subprocess.CompletedProcess[str]:
    """Returns a process that has read bodies, and then runs the code; its output ends when its pool's and
    multiprocessing's tracker's do, which write to the same pipe."""
    script = folder / "script.py"
    script.write_text(READER + code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": warnings}
    command = [sys.executable, script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("warnings", ["", "default"])
def test_a_server_that_is_killed_leaves_nothing_and_nobody_says_otherwise(
    tmp_path: Path, warnings: str
) -> None:
    process = ended(tmp_path, KILLED, warnings)
    assert (process.returncode, process.stderr) == (-signal.SIGKILL, "")
    names = process.stdout.split()
    assert len(names) == 2
    assert not any(Path(f"/dev/shm/sem.{name.lstrip('/')}").exists() for name in names)


STOPPED = """
    (starting,) = multiprocessing.active_children()
    os.kill(starting.pid, signal.SIGSTOP)
    reader.close()
"""


def test_a_server_that_ends_waits_for_no_process_that_is_still_starting(tmp_path: Path) -> None:
    process = ended(tmp_path, STOPPED)
    assert (process.returncode, process.stderr) == (0, "")


async def test_without_a_pool_the_server_reads_them_itself() -> None:
    odd = byte_tokenizer()
    odd.odd = lambda: None  # what cannot be sent
    for settings in ({"body_processes": 0}, {"tokenizer": odd}):
        async with serve(ScriptedEngine(), **settings) as client:
            assert (await client.post("completions", **PADDED)).is_success
            assert client.app.state.models.only.bodies._pool is None  # type: ignore[attr-defined]


async def test_the_default_limit_follows_from_the_context() -> None:
    long = engine_info(max_model_len=100_000)
    sizes = [default_body_bytes(each, byte_tokenizer()) for each in (512, 100_000)]
    assert sizes[1] - sizes[0] == 2 * (100_000 - 512) * len("<|assistant|>")
    for engine, status in ((ScriptedEngine(), 413), (ScriptedEngine(info=long), 200)):
        async with serve(engine, body_processes=0) as client:
            reply = await client.post("/completions", **as_json({"prompt": "a"}, sizes[0]))
            assert reply.status_code == status
