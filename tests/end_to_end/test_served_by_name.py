"""``slipstream serve org/repo:QUANT`` from a stand-in hub to the first token, drafts by name among it;
what broke off is gone on with by the next start; and refusals, each a line of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from engine.process.launch import child_environment
from slipstream.cli import main
from worlds.gguf_files import split_in_three, tiny_llama, write_gguf
from worlds.hub import Hub, environment, pointed_at, running
from worlds.served_command import HANG, serving

REPO = "org/tiny-GGUF"
QUIET = ("--log-level", "error", "--port", "0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("files")
    small = tiny_llama(num_hidden_layers=1)
    parts = split_in_three(write_gguf(folder / "target.gguf"), folder)
    return {
        **{f"F16/{part.name.replace('tiny', 'tiny-F16')}": part.read_bytes() for part in parts},
        "draft-F32.gguf": write_gguf(folder / "draft.gguf", model=small).read_bytes(),
    }


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # The part that comes before it breaks is more than one of the pieces that are written at once.
    big = {**files, "large-Q8_0.gguf": b"none" * (25 << 18)}
    with running(Hub({REPO: big, "org/gated": dict(files)}, gated={"org/gated"})) as found:
        for name, value in environment(found, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


def refused(*arguments: str) -> str:
    """Returns the output of a command that ends without having served."""
    command = [sys.executable, "-m", "slipstream.cli", "serve", *arguments, *QUIET]
    environment = child_environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.returncode == 2, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("slipstream: ")]
    return line


@pytest.mark.slow
def test_a_name_serves_with_a_draft_by_name(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    draft = f"small_model={REPO}:draft-F32.gguf"
    flags = ("--draft", draft, "--num-threads", "1", "--max-num-seqs", "2")
    with serving(tmp_path, *flags, model=f"hf.co/{REPO}:f16") as server:
        client = server.client()
        (model,) = client.models.list().data
        assert model.id == f"{REPO}:F16"
        asked: Any = {
            "model": model.id,
            "prompt": "hello world",
            "max_tokens": 12,
            "temperature": 0,
        }
        drafts = ({"draft_strategy": drafter} for drafter in ("none", "small_model"))
        texts: list[Any] = [
            client.completions.create(**asked, extra_body={"speculative": each}) for each in drafts
        ]
        assert texts[0].choices[0].text == texts[1].choices[0].text
        account = texts[1].usage.model_extra["speculative"]
        assert account["num_draft_tokens"] > 0
        drafters = httpx.get(f"{server.url}/v1/drafters", timeout=HANG).json()
        assert "tiny-GGUF:F32" in str(drafters), "a draft is called by its name"
        tags = httpx.get(f"{server.url}/api/tags", timeout=HANG).json()["models"]
        assert [each["name"] for each in tags] == [f"{REPO}:F16"]
    assert sorted(hub.served) == sorted(files), "the target in three parts, and the draft"
    assert all(len(times) == 1 for times in hub.served.values()), "fetched more than once"


def test_refusals_are_a_line_each_and_fetch_nothing(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pointed_at(monkeypatch, hub, tmp_path)

    def said(*arguments: str) -> str:
        assert main(["serve", *arguments, *QUIET]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    there = "there is no Q4_K_M in it; there are F32 ("
    assert said(f"{REPO}:Q4_K_M").startswith(f"slipstream: {REPO}:Q4_K_M: {there}")
    assert said("org/none").startswith("slipstream: org/none: there is no such model on the hub")
    assert said("org/gated:F16").startswith("slipstream: org/gated:F16: it is gated: accept its")
    assert said("bundled", "--draft", "org/none").startswith("slipstream: org/none: there is no")
    assert said("bundled", "--lora", "a=org/none").startswith("slipstream: org/none: there is no")
    assert "none_such" in said(f"{REPO}:F16", "--speculative.draft-strategy", "none_such")
    monkeypatch.setattr("engine.drafting.located.available_bytes", lambda: 1000)
    assert "F16 needs 0.322 MB of memory, and 0.001 MB are left" in said(f"{REPO}:F16")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = "org/other: it is not in the cache, and HF_HUB_OFFLINE is set"
    assert said("org/other") == f"slipstream: {offline}"
    assert not hub.served


@pytest.mark.slow
def test_a_download_that_broke_off_goes_on_at_the_next_start(hub: Hub) -> None:
    whole = hub.repos[REPO]["large-Q8_0.gguf"]
    hub.breaks_at = 21 << 20
    said = refused(f"{REPO}:Q8_0")
    assert f"{REPO}:Q8_0: broken off at 21 MB of 26" in said
    hub.breaks_at, hub.is_broken = None, False
    # It is no GGUF file, which is seen once it is there.
    assert "begin as a GGUF file" in refused(f"{REPO}:Q8_0")
    (first, _), (rest, length) = hub.served["large-Q8_0.gguf"]
    assert (first, rest + length) == (0, len(whole))
    assert rest == 20 << 20, "whole pieces are kept"
    assert os.environ["HF_ENDPOINT"] == hub.url
