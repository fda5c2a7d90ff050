"""The documentation: it builds, its links lead somewhere, and its references are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

import pytest
from pydantic import BaseModel

from docs import generate
from docs.hooks import without_outside_links
from docs.pictures.draw import PICTURES
from engine.request.info import SAMPLED
from server.apis.anthropic.request import MessagesRequest
from server.apis.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from server.apis.openai.request import ChatRequest, CompletionRequest, EmbeddingsRequest
from server.reply.usage import SpeculativeUsage
from server.request.chat import Prediction, StreamOptions
from server.request.messages import ChatMessage
from server.request.speculative import SpeculativeField
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEXTS = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LOADED = re.compile(r"<(?:link|img|script)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")


def test_the_site_has_every_page_no_script_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Built strictly: a link or an anchor that leads nowhere, or a page that the navigation does not
    name, is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    # The theme announces its authors' plans on every build.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command += ["--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in TEXTS:
        assert (tmp_path / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    assert not list(tmp_path.rglob("*.py"))
    pages = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")]
    assert [each for text in pages for each in _LOADED.findall(text)] == []


def test_relative_links_of_the_sources_exist_as_a_forge_shows_them() -> None:
    missing = []
    for page, text in TEXTS.items():
        links = [urldefrag(link)[0] for link in _LINK.findall(_CODE.sub("", text))]
        local = [link for link in links if link and not urlsplit(link).scheme]
        missing += [(page, link) for link in local if not (page.parent / link).exists()]
    assert missing == []


def test_links_out_of_the_pages_become_paths() -> None:
    outside = "see [the file](../deploy/compose.yaml)."
    assert without_outside_links(outside, "operations.md") == (
        "see the file (`deploy/compose.yaml`)."
    )
    code = "[`bench/a.py`](../../bench/a.py#x)"
    assert without_outside_links(code, "drafters/heads.md") == "`bench/a.py`"
    inside = "[rules](../verification.md#how-it-works)"
    assert without_outside_links(inside, "drafters/heads.md") == inside


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_shown_and_what_their_scripts_draw(name: str) -> None:
    current = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    assert PICTURES[name]() == current, "run python -m docs.pictures.draw"
    assert "http" not in current.replace("http://www.w3.org/2000/svg", "")
    assert f"pictures/{name}" in " ".join(TEXTS.values())


def test_generated_tables_are_current() -> None:
    readme = ROOT / "README.md"
    texts = TEXTS | {readme: readme.read_text(encoding="utf-8")}
    for name in generate.TABLES:
        assert sum(f"<!-- generated: {name} -->" in text for text in texts.values()) == 1, name
    for page, text in texts.items():
        assert generate.refreshed(text) == text, f"{page}: run python -m docs.generate"


def test_the_tables_have_what_they_are_for() -> None:
    flags = set(re.findall(r"`--([\w.-]+)`(?:,| \|)", TEXTS[DOCS / "settings.md"]))
    apart = {"speculative", "speculative_caps", "sampling", "model", "drafter"}
    wanted = set(Settings.model_fields) - apart
    wanted |= {f"speculative.{name}" for name in SpeculativeField.model_fields}
    wanted |= {f"sampling.{name}" for name in SAMPLED}
    assert {name.replace("_", "-") for name in wanted} <= flags
    exported = [name for name, *_ in generate.exported_metrics()]
    assert len(exported) > 40
    assert [each for each in exported if f"`{each}`" not in TEXTS[DOCS / "metrics.md"]] == []


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatRequest,
        MessagesRequest,
        ChatMessage,
        StreamOptions,
        Prediction,
        SpeculativeField,
        SpeculativeUsage,
        EmbeddingsRequest,
        OllamaChatRequest,
        OllamaGenerateRequest,
        OllamaMessage,
        OllamaOptions,
    ],
)
def test_the_api_page_names_every_field(model: type) -> None:
    names = model.model_fields if issubclass(model, BaseModel) else model.__annotations__
    assert len(names) > 0
    assert [name for name in names if f"`{name}`" not in TEXTS[DOCS / "api.md"]] == []


def test_the_api_page_names_every_endpoint() -> None:
    folders = (ROOT / "server" / name for name in ("apis", "endpoints"))
    files = (path for folder in folders for path in folder.rglob("*.py"))
    source = " ".join(path.read_text(encoding="utf-8") for path in files)
    routes = set(re.findall(r'@router\.(?:get|post)\(\s*"([^"]+)"', source))
    assert len(routes) > 8
    named = [path.replace(":path", "") for path in routes]
    assert [path for path in named if f"{path}`" not in TEXTS[DOCS / "api.md"]] == []
