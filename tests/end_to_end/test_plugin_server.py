"""The example of a drafter from outside: built, installed into a folder, and served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.cli import main
from worlds.served_command import HANG, Server, serving
from worlds.serving import fault

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODULE = "slipstream_phrase_book"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the example; built from a copy, since builds leave folders behind."""
    source = tmp_path_factory.mktemp("source") / "plugin_drafter"
    shutil.copytree(ROOT / "examples" / "plugin_drafter", source)
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", target, source]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def server(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--max-model-len", "512"]
    flags += ["--drafters", "none,ngram,phrase_book"]
    # A grant that knows no clock: what is accepted is a function of the text.
    flags += ["--speculative.draft-strategy=phrase_book", "--speculative.adaptive-depth=fixed"]
    with serving(tmp_path_factory.mktemp("server"), *flags, path=site) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=HANG) as found:
        yield found


def complete(client: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, **fields}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_the_plugin_is_listed_like_any_other(client: httpx.Client, server: Server) -> None:
    listing = client.get("/v1/drafters").json()
    assert [each["id"] for each in listing["data"]] == ["none", "ngram", "phrase_book"]
    card = listing["data"][-1]
    assert card["cost"]
    (option,) = card["options"]
    assert (option["name"], option["minimum"], option["maximum"]) == ("min_match", 2, 16)
    assert listing["defaults"]["draft_strategy"] == "phrase_book"
    point = f"(entry point phrase_book = {MODULE}"
    origin = f"phrase_book comes from slipstream-phrase-book 0.1.0 {point}"
    assert origin in server.log.read_text()
    wrong = {"prompt": "x", "speculative": {"options": {"min_match": 17}}}
    reply = client.post("/v1/completions", json=wrong)
    assert fault(reply, "param") == (400, "speculative.options.min_match")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.5, "seed": 3}])
def test_its_drafts_are_accepted_counted_and_change_nothing(
    client: httpx.Client, sampling: dict[str, Any]
) -> None:
    prompts = [
        'import sys\n\n\ndef main():\n    print("hello")\n    return 0\n\n\nif __name__ ==',
        "class Reader(Base):\n    def __init__(self, *args",
    ]
    num_accepted = 0
    for prompt in prompts:
        drafted = complete(client, prompt, **sampling)
        plain = complete(client, prompt, speculative={"draft_strategy": "none"}, **sampling)
        assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
        account = drafted["usage"]["speculative"]
        assert account["drafter"] == "phrase_book"
        assert plain["usage"]["speculative"]["num_draft_tokens"] == 0
        num_accepted += account["num_accepted_tokens"]
    assert num_accepted >= 5
    counter = r'^slipstream_\w*accepted\w*_total{[^}]*"phrase_book"[^}]*} (\S+)'
    counted = re.search(counter, client.get("/metrics").text, re.M)
    assert float(counted[1]) >= num_accepted


def test_it_can_be_replayed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": "import", "completion": " os\nimport sys\n"}) + "\n")
    assert main(["replay", str(log), "--drafters", "phrase_book,ngram", "--budgets", "8"]) == 0
    assert "phrase_book" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["replay", str(log), "--drafters", "phrase_bok"])
    assert "unknown drafter 'phrase_bok'; known: " in (told := capsys.readouterr().err)
    assert "phrase_book" in told


def test_a_clash_ends_the_start_before_a_model_is_loaded(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    info = next(site.glob("*.dist-info"))
    copy = tmp_path / info.name
    shutil.copytree(info, copy)
    points = f"[slipstream.drafters]\nngram = {MODULE}:make_drafter\n"
    (copy / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["serve", "no/such/model", "--port", "0"]) == 2
    message = capsys.readouterr().err
    plugin = "drafter plugin of slipstream-phrase-book 0.1.0 (entry point ngram"
    assert f"slipstream: {plugin}" in message
    assert "a drafter of the core" in message
    # Turned off, it is no hindrance any more: the start goes on to the model, which is missing.
    assert main(["serve", "no/such/model", "--port", "0", "--drafter-plugins", "[]"]) == 2
    assert "plugin" not in capsys.readouterr().err
