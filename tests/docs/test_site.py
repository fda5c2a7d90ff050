"""The documentation: it builds, its links lead somewhere, and its references are complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml
from pydantic import BaseModel

from server.reply.usage import SpeculativeUsage
from server.request.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Prediction,
    StreamOptions,
)
from server.request.speculative import SpeculativeField
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def module(path: Path) -> ModuleType:
    """A script below docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


# --- the site ---


class Page(HTMLParser):
    """What a built page links to and loads, and the anchors it has."""

    LINKS: ClassVar = {"a": "href", "link": "href", "img": "src", "script": "src"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        target = found.get(self.LINKS.get(tag, ""))
        if target:
            self.links.append((tag, target))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning is an error."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target]
    # The theme announces its authors' plans on every build.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_in_the_site_and_the_scripts_are_not(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    assert not list(site.rglob("*.py"))


def test_internal_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":  # Its links are absolute: it may stand for any path.
            continue
        for _, link in page.links:
            if urlsplit(link).scheme:
                continue
            target, anchor = urldefrag(link)
            found = (path.parent / unquote(target)).resolve() if target else path
            checked += 1
            if found.is_dir():
                found /= "index.html"
            missing = not found.exists() or not found.is_relative_to(site.resolve())
            if missing or (anchor and found in pages and anchor not in pages[found].anchors):
                broken.append(f"{path.name}: {link}")
    assert checked > 100
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    loaded = {
        link
        for page in pages.values()
        for tag, link in page.links
        if tag != "a" and urlsplit(link).netloc
    }
    assert loaded == set()


def test_the_navigation_names_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def named(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        assert not isinstance(values, str | int)
        return [name for each in values for name in named(each)]  # type: ignore[attr-defined]

    names = named(config["nav"])
    assert sorted(names) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


# --- the sources, as a forge shows them ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_relative_links_of_the_sources_exist(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    links = [urldefrag(link)[0] for link in _LINK.findall(text) if not urlsplit(link).scheme]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_links_out_of_the_pages_become_paths() -> None:
    rewrite = module(DOCS / "hooks.py").without_outside_links
    assert rewrite("see [the file](../deploy/compose.yaml).", "operations.md") == (
        "see the file (`deploy/compose.yaml`)."
    )
    assert rewrite("[`bench/a.py`](../../bench/a.py#x)", "drafters/heads.md") == "`bench/a.py`"
    inside = "[rules](../verification.md#how-it-works)"
    assert rewrite(inside, "drafters/heads.md") == inside


# --- pictures ---


def pictures() -> dict[str, object]:
    return dict(module(DOCS / "pictures" / "draw.py").PICTURES)


@pytest.mark.parametrize("name", ["one_step.svg", "tree_mask.svg", "gamma.svg", "blocks.svg"])
def test_pictures_are_what_their_scripts_draw(name: str) -> None:
    make = pictures()[name]
    assert callable(make)
    current = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    assert make() == current, "run python -m docs.pictures.draw"
    assert "http" not in current.replace("http://www.w3.org/2000/svg", "")


def test_every_picture_is_shown() -> None:
    shown = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in pictures() if f"pictures/{name}" not in shown] == []


# --- references ---


def test_generated_tables_are_current() -> None:
    generate = module(DOCS / "generate.py")
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for name in generate.TABLES:
        assert sum(f"<!-- generated: {name} -->" in text for text in texts.values()) == 1, name
    for page, text in texts.items():
        assert generate.refreshed(text) == text, f"{page}: run python -m docs.generate"


def test_the_tables_have_what_they_are_for() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"^\| `--([\w.-]+)` \|", text, re.MULTILINE))
    nested = {"speculative", "speculative_caps"}
    wanted = {name for name in Settings.model_fields if name not in nested | {"model", "drafter"}}
    wanted |= {f"speculative.{name}" for name in SpeculativeField.model_fields}
    assert {name.replace("_", "-") for name in wanted} <= flags
    metrics = (DOCS / "metrics.md").read_text(encoding="utf-8")
    exported = module(DOCS / "generate.py").exported_metrics()
    assert len(exported) > 40
    assert [name for name, *_ in exported if f"`{name}`" not in metrics] == []


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatRequest,
        ChatMessage,
        StreamOptions,
        Prediction,
        SpeculativeField,
        SpeculativeUsage,
    ],
)
def test_the_api_page_names_every_field(model: type) -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = model.model_fields if issubclass(model, BaseModel) else model.__annotations__
    assert len(names) > 0
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_api_page_names_every_endpoint() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    folder = ROOT / "server" / "endpoints"
    source = " ".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    routes = set(re.findall(r'@router\.(get|post)\(\s*"([^"]+)"', source))
    assert len(routes) > 8
    missing = [path for _, path in routes if f"{path.replace(':path', '')}`" not in text]
    assert missing == []
