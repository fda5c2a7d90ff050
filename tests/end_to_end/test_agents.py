"""Coding agents, as they come, against a live server: their requests are taken, their tools run, and what
they say comes of drafts.

They are no dependencies of ours: each test runs where ``claude`` or ``codex`` is on the path (npm has
them as ``@anthropic-ai/claude-code`` and ``@openai/codex``), and is skipped elsewhere.
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

pytestmark = pytest.mark.slow
CLAUDE, CODEX = (
    pytest.mark.skipif(find_tool(name) is None, reason=f"no {name} on the path")
    for name in ("claude", "codex")
)

SECRET = "the answer is 4711"
HANG = 300.0


def ask(url: str, model: str, folder: Path, question: str, *options: str) -> dict[str, Any]:
    """Returns the agent's own report on a question, asked in ``folder``."""
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


@CLAUDE
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


@CLAUDE
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


PATCH = f"*** Begin Patch\n*** Add File: made.txt\n+{SECRET}\n*** End Patch\n"


@CODEX
def test_codex_patches_a_file_and_asks_for_an_agent(tmp_path: Path) -> None:
    """Its patch is the text of a custom tool where the model's name is OpenAI's; agents are a namespace
    where it is not."""
    for name, called, given in (
        ("gpt-5.5", "apply_patch", {"input": PATCH}),
        ("some/model", "multi_agent_v1__close_agent", {"target": "nobody"}),
    ):
        call = f"<tool_call>{json.dumps({'name': called, 'arguments': given})}</tool_call>"
        texts = iter([call, SECRET])
        engine = ScriptedEngine(
            script=lambda _, texts=texts: [*next(texts).encode(), EOS],
            info=engine_info(max_model_len=200_000),
        )
        settings = Settings(tool_call_parser="hermes", served_model_name=name)
        with listening(build_app(engine, byte_tokenizer(), settings)) as url:
            provider = f'{{name="s", base_url="{url}/v1", wire_api="responses"}}'
            said = ("model_provider=s", f"model_providers.s={provider}", f"model={name}")
            program = find_tool("codex")
            assert program is not None
            done = subprocess.run(
                [program, "exec", "--skip-git-repo-check", "-s", "workspace-write"]
                + [part for each in said for part in ("-c", each)]
                + ["Make made.txt."],
                cwd=tmp_path,
                env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=HANG,
            )
        assert done.stdout.strip() == SECRET, done.stderr
        first, second = map(text_of, engine.requests)
        assert f'"name": "{called}"' in first
        assert second.startswith(first.removesuffix("effort medium "))
    assert (tmp_path / "made.txt").read_text() == f"{SECRET}\n"
    assert "nobody" in second
