"""docs/extend.md: its examples are files that work where the page puts them; nothing else is edited."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from worlds.served_command import HANG, serving
from worlds.serving import fault

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extend.md"
COPIED = (
    *("server", "engine", "drafters", "compiled", "kvpool", "slipstream", "bench"),
    *("deploy", "docs", "tests", "pyproject.toml", "README.md"),
)
_FILE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_BODY = re.compile(r"^curl localhost:8000(\S+) .*?-d '(.*?)'$", re.MULTILINE | re.DOTALL)
SHOWN = "engine/states/operators/mamba1_scan.py"
CIRCLE = "x = 0\nx = 0\nx = 0\n"


def page_files() -> dict[str, str]:
    return dict(_FILE.findall(PAGE.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the page's files in it."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "bundled")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    (folder / "engine" / "bundled").symlink_to(ROOT / "engine" / "bundled")
    for name, text in page_files().items():
        path = folder / name
        if path.parent.parent == folder / "server" / "apis":
            path.parent.mkdir()
        assert path.parent.is_dir(), f"{name} lies in a folder that is not there"
        if name != SHOWN:
            assert not path.exists(), f"{name} is in the project already"
        path.write_text(text, encoding="utf-8")
    return folder


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    how: Any = {"cwd": project, "env": os.environ | {"PYTHONPATH": str(project)}}
    return subprocess.run([sys.executable, *command], **how, capture_output=True, text=True)


@pytest.fixture(scope="module")
def client(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of ``slipstream serve`` with the page's drafter setting and attention backend."""
    flags = ["--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--max-model-len", "512"]
    flags += ["--drafter.echo.most", "6", "--attention-backend", "row_by_row"]
    with (
        serving(tmp_path_factory.mktemp("server"), *flags, path=project) as server,
        httpx.Client(base_url=server.url, timeout=HANG) as found,
    ):
        yield found


def complete(client: httpx.Client, prompt: str = CIRCLE, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, **fields}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


def plain(client: httpx.Client, prompt: str = CIRCLE, **fields: Any) -> str:
    return text_of(complete(client, prompt, speculative={"draft_strategy": "none"}, **fields))


def refusal(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def test_what_the_page_shows_of_the_project_is_what_it_has() -> None:
    assert page_files()[SHOWN] == (ROOT / SHOWN).read_text(encoding="utf-8")


def test_every_kind_has_its_file_and_pages_name_folders_that_exist() -> None:
    kinds = {str(Path(name).parent) for name in page_files() if not name.startswith("tests/")}
    assert kinds == {
        "drafters/copying",
        "engine/speculation/gamma",
        "engine/sampling/processors",
        "engine/attention",
        "server/endpoints",
        "engine/weights/formats",
        "engine/drafting/published",
        "engine/weights/gguf/architectures",
        "engine/states/operators",
        "server/apis/cohere",
    }


def test_the_commands_of_the_page_are_answered(client: httpx.Client) -> None:
    found = _BODY.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == 5
    for path, body in found:
        headers = {"content-type": "application/json"}
        reply = client.post(path, content=body, headers=headers)
        assert reply.status_code == 200, reply.text


def test_the_drafter_is_listed_and_drafts_what_the_target_writes(client: httpx.Client) -> None:
    cards = {each["id"]: each for each in client.get("/v1/drafters").json()["data"]}
    assert [each["name"] for each in cards["echo"]["options"]] == ["period"]
    speculative = {"draft_strategy": "echo", "adaptive_depth": False, "options": {"period": 5}}
    reply = complete(client, speculative=speculative)
    account = reply["usage"]["speculative"]
    assert account["drafter"] == "echo"
    assert account["num_accepted_tokens"] > 0
    assert text_of(reply) == plain(client)
    wrong = {"draft_strategy": "echo", "options": {"period": 0}}
    assert refusal(client, speculative=wrong)["param"] == "speculative.options.period"


def test_the_policy_is_offered_and_grants_by_what_was_accepted(client: httpx.Client) -> None:
    speculative = {"adaptive_depth": "aimd", "max_speculative_tokens": 6}
    reply = complete(client, speculative=speculative)
    assert text_of(reply) == plain(client)
    gammas = [move["gamma"] for move in reply["usage"]["speculative"]["gamma_changes"]]
    assert len(gammas) > 2
    assert max(gammas) <= 6
    assert "aimd" in refusal(client, speculative={"adaptive_depth": "aimed"})["message"]
    unread = {"adaptive_depth": "aimd", "target_acceptance_rate": 0.5}
    assert refusal(client, speculative=unread)["param"] == "speculative.target_acceptance_rate"


def test_the_parameter_holds_with_drafts_as_without(client: httpx.Client) -> None:
    size = 5
    body = {"max_tokens": 24, "return_token_ids": True, "no_repeat_ngram_size": size}
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        expected = plain(client, **body, **sampling)
        for drafter in ("echo", "ngram", "suffix"):
            speculative = {"draft_strategy": drafter, "adaptive_depth": False}
            reply = complete(client, speculative=speculative, **body, **sampling)
            assert text_of(reply) == expected
            written = reply["choices"][0]["token_ids"]
            runs = [tuple(written[at : at + size]) for at in range(len(written) - size + 1)]
            assert len(runs) > size
            assert len({*runs}) == len(runs)
    assert refusal(client, no_repeat_ngram_size=-1)["param"] == "no_repeat_ngram_size"


def test_the_backend_serves_and_is_said(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["attention_backend"] == "row_by_row"
    speculative = {"draft_strategy": "suffix", "tree_strategy": "tree", "tree_width": 3}
    assert text_of(complete(client, speculative=speculative)) == plain(client)


def test_the_endpoint_is_part_of_the_application(client: httpx.Client) -> None:
    assert "/v1/pieces" in client.get("/openapi.json").json()["paths"]
    reply = client.post("/v1/pieces", json={"token_ids": []})
    assert fault(reply, "param") == (400, "token_ids")


PACKED = """
import sys; sys.path.append("tests")
from pathlib import Path
import torch
from engine.model.quantization import packed_weights
from worlds.packed_checkpoints import load, plain, write_folder
from engine.model.loader import prepare_model

def stored(name, linear):
    scales = linear.weight.detach().float().abs().amax(1) / 127
    codes = (linear.weight.detach().float() / scales[:, None]).round()
    return {"codes": codes.char(), "scales": scales}, codes * scales[:, None]

path = Path(sys.argv[1])
expected = write_folder(path, {"quant_method": "row-int8", "bits": 8}, stored)
ids = torch.arange(12)[None]
with torch.inference_mode():
    torch.testing.assert_close(plain(load(path))(ids).logits, expected(ids).logits)
print(len(list(packed_weights(prepare_model(load(path), torch.device("cpu"))))) > 7)
"""
HEADS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import DraftFolder, DraftRefusedError
from engine.drafting.published.methods import method_of, read_network

path, facts = Path(sys.argv[1]), TargetFacts(8, 16, 4, "")
tensors = {"weight": torch.randn(1, 3, 8, 8), "bias": torch.randn(1, 3, 1, 8)}
save_file(tensors, path / "model.safetensors")
for size in (8, 9):
    config = {"num_flat_heads": 3, "target": {"hidden_size": size}}
    (path / "config.json").write_text(json.dumps(config))
    try:
        network = read_network(method_of(DraftFolder.open(path)), path, facts, None)
        print(network.num_heads, torch.equal(network.blocks.weight, tensors["weight"]))
    except DraftRefusedError as error:
        print(error)
"""
XVERSE = """
import sys; sys.path.append("tests")
from pathlib import Path
import torch
from engine.model.loader import load_model
from worlds.gguf_files import tiny_llama, values_of, write_gguf

model, path = tiny_llama(), Path(sys.argv[1]) / "tiny.gguf"
own = {key.replace("llama.", "xverse."): each for key, each in values_of(model).items()}
write_gguf(path, model=model, values={**own, "general.architecture": "xverse"})
ids = torch.arange(12)[None]
with torch.inference_mode():
    print(torch.equal(load_model(str(path), torch.device("cpu"))(ids).logits, model(ids).logits))
"""
MAMBA = """
import sys; sys.path.append("tests")
import transformers as hf
from engine.model.selfcheck import check_logits, reference_logits
from worlds.tiny_models import enlarge, make_runner

sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
model = hf.AutoModelForCausalLM.from_config(hf.MambaConfig(**sizes)).eval()
enlarge(model)
reference = reference_logits(model)
check_logits(make_runner(model, exact=True), reference)
print(float(reference.std()) > 0.01)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (PACKED, "True\n"),
        (HEADS, "3 True\nPATH: target.hidden_size is 9, and this model has 8\n"),
        (XVERSE, "True\n"),
        (MAMBA, "True\n"),
    ],
)
def test_what_folders_and_files_hold_is_found_and_read(
    code: str, said: str, project: Path, tmp_path: Path
) -> None:
    result = run(project, "-c", code, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == said.replace("PATH", str(tmp_path))


def test_the_api_is_one_folder(client: httpx.Client) -> None:
    assert "/v1/generate" in client.get("/openapi.json").json()["paths"]
    body = {"prompt": "a", "max_tokens": 4, "num_generations": 2, "temperature": 0}
    reply = client.post("/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["generations"]) == 2
    for padding in ("", " " * 20_000):  # read here, and in another process
        content = json.dumps(body | {"num_generations": 200}) + padding
        headers = {"content-type": "application/json"}
        refused = client.post("/v1/generate", content=content, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["message"].startswith("num_generations: ")


def test_help_and_the_generated_tables_name_them_all(project: Path) -> None:
    helped = run(project, "-m", "slipstream.cli", "serve", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--drafter.echo.most" in helped.stdout
    written = run(project, "-m", "docs.generate")
    assert written.returncode == 0, written.stderr
    api = (project / "docs" / "api.md").read_text(encoding="utf-8")
    settings = (project / "docs" / "settings.md").read_text(encoding="utf-8")
    named = ("no_repeat_ngram_size", "aimd", "/v1/pieces", "/v1/generate")
    assert [name for name in named if name not in api] == []
    assert "--drafter.echo.most" in settings


def test_its_files_are_in_the_style_that_a_change_needs(project: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        result = run(project, "-m", "ruff", *command, "--no-cache", *page_files())
        assert result.returncode == 0, result.stdout


def test_its_tests_pass(project: Path) -> None:
    names = [name for name in page_files() if name.startswith("tests/")]
    result = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names)
    assert result.returncode == 0, result.stdout
