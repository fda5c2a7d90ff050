"""A coding agent, as it comes, against a live server: its requests are taken, its tools run, and what it
says comes of drafts.

It is no dependency of ours: each test runs where ``claude`` is on the path (npm has it as
``@anthropic-ai/claude-code``), and is skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.request.params import GenerationRequest
from server.app import build_app
from server.settings import Settings
from worlds.client_servers import listening
from worlds.deploy_tools import find_tool
from worlds.live_prometheus import live_server
from worlds.scripted_engine import EOS, ScriptedEngine, byte_tokenizer, engine_info

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_tool("claude") is None, reason="no claude on the path"),
]

SECRET = "the answer is 4711"
HANG = 300.0


def ask(url: str, model: str, folder: Path, question: str, *options: str) -> dict[str, Any]:
    """What the agent says that came of a question, asked in ``folder``."""
    program = find_tool("claude")
    assert program is not None
    (folder / "home").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [program, "-p", question, "--output-format", "json", *options],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def text_of(request: GenerationRequest) -> str:
    return bytes(each for each in request.prompt_token_ids if each < 256).decode()


def test_its_loop_reads_a_file_and_answers(tmp_path: Path) -> None:
    """All its tools are sent along, and the prompt that goes with them."""
    note = tmp_path / "note.txt"
    note.write_text(SECRET)
    call = json.dumps({"name": "Read", "arguments": {"file_path": str(note)}})

    def script(request: GenerationRequest) -> list[int]:
        is_answered = SECRET in text_of(request)
        text = SECRET if is_answered else f"I look.\n<tool_call>\n{call}\n</tool_call>"
        return [*text.encode(), EOS]

    engine = ScriptedEngine(script=script, info=engine_info(max_model_len=200_000))
    app = build_app(engine, byte_tokenizer(), Settings(tool_call_parser="hermes"))
    with listening(app) as url:
        found = ask(url, "test/scripted", tmp_path, "What stands in note.txt?")
    assert (found["is_error"], found["result"]) == (False, SECRET), found
    assert found["num_turns"] == 2
    first, second = map(text_of, engine.requests)
    assert "x-anthropic-billing-header" not in first
    assert '"name": "Bash"' in first
    # What a prefix cache finds: all of the first prompt but what the template ends with.
    assert second.startswith(first.removesuffix("effort high "))
    assert "assistant: I look." in second
    assert f"tool: 1\t{SECRET}" in second


def test_what_it_says_comes_of_drafts(tmp_path: Path) -> None:
    drafted = {"draft_strategy": "nasd", "adaptive_depth": "fixed", "num_speculative_tokens": 3}
    with live_server(speculative=drafted) as server:
        url = f"http://{server.address}"
        options = ("--tools", "", "--system-prompt", "Write Python.")
        found = ask(url, "slipstream-bundled", tmp_path, "def add(a, b):", *options)
        figures = httpx.get(f"{url}/metrics", timeout=HANG).text.splitlines()
    counted = [line.rsplit(" ", 1) for line in figures if not line.startswith("#")]
    answered = [name for name, _ in counted if "http_requests" in name and "/v1/messages" in name]
    assert answered
    assert all('status="200"' in name for name in answered), answered
    drafts = [
        float(count)
        for name, count in counted
        if name.startswith("vllm:spec_decode_num_draft_tokens_total")
    ]
    assert sum(drafts) > 0, found
