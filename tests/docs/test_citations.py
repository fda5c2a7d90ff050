"""Everything that the repository's texts and comments cite can be found in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from server.setting_names import OTHER_VARIABLES, all_settings, variable_name
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
TYPES = {".css", ".html", ".js", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
MADE = {"__pycache__", "site", "dist", "runs", "data", "slipstream_llm.egg-info"}
# Notes that were kept beside the repository while it was written.
ELSEWHERE = re.compile(
    r"\b(?:ALGORITHMS|DESIGN|HOUSE|PEERS|STYLE)\b|(?<![\w/])(?:\.\./)?shared/|\bD\d+\.\d\b"
)
FOLDERS = (
    "server|engine|drafters|kvpool|slipstream|bench|training|docs|tests|scripts|deploy|examples"
)
FILE = re.compile(
    rf"(?<![\w./-])(?:{FOLDERS})/[\w/.-]*\w\.(?:py|md|sh|json|jsonl|ya?ml|js|txt|html|svg|png)\b"
)
# Texts with paths that are made up, or patterns of what is found, or of URLs.
EXEMPT = {
    "server/reference/index.html",
    "tests/docs/test_citations.py",
    "tests/docs/test_site.py",
    "tests/server/http/test_pages.py",
}


def texts() -> Iterator[tuple[Path, str]]:
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = (
            any(part.startswith(".") and part != ".ci" for part in parts) or parts[0] == "build"
        )
        if hidden or MADE & set(parts) or path.suffix not in TYPES or not path.is_file():
            continue
        if path.relative_to(ROOT).as_posix() not in EXEMPT:
            yield path, path.read_text(encoding="utf-8")


def missing_files(path: Path, text: str) -> list[str]:
    """Cited paths that lead nowhere, from the root or from the text's own folder."""
    places = (ROOT, path.parent, ROOT / "docs")
    return [
        name for name in FILE.findall(text) if not any((place / name).exists() for place in places)
    ]


def test_citations_of_notes_and_of_missing_files_would_be_found() -> None:
    text = "as in ALGORITHMS 2.4, DESIGN D9 and ../shared/HOUSE.md; see engine/none.py, README.md"
    assert len(ELSEWHERE.findall(text)) == 4
    assert missing_files(ROOT / "README.md", text) == ["engine/none.py"]
    plain = "STYLED text, an underlined_STYLE, is_shared/own; engine/core.py"
    assert ELSEWHERE.findall(plain) == missing_files(ROOT / "README.md", plain) == []


def test_what_is_cited_is_here() -> None:
    """But for the files that the reader of the page on extensions writes."""
    notes, files, count = {}, {}, 0
    for path, text in texts():
        count += 1
        notes[path] = ELSEWHERE.findall(text)
        if not path.stem.startswith(("extend", "test_extend")):
            files[path] = missing_files(path, text)
    assert count > 300
    assert {path: found for path, found in notes.items() if found} == {}
    assert {path: found for path, found in files.items() if found} == {}


SPAN = re.compile(r"`([^`\n]+)`")
MODULE = re.compile(r"[\w/]*\w\.py")
CLASS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+")
MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)")
VARIABLE = re.compile(r"\bSLIPSTREAM_[A-Z0-9_]*[A-Z0-9]\b")


def missing_names(page: str, files: set[str], words: set[str], variables: set[str]) -> list[str]:
    """Modules, classes, members and variables of settings that a page names and nothing has."""
    missing = VARIABLE.findall(page)
    missing = [name for name in missing if name not in variables]
    for span in SPAN.findall(page):
        if MODULE.fullmatch(span):
            is_there = any(f"/{name}".endswith(f"/{span}") for name in files)
        elif member := MEMBER.fullmatch(span):
            is_there = words.issuperset(member.groups())
        else:
            is_there = not CLASS.fullmatch(span) or span in words
        missing += [] if is_there else [span]
    return missing


def test_pages_name_modules_classes_and_variables_that_exist() -> None:
    code = {
        path: text for path, text in texts() if path.suffix in {".py", ".yml", ".yaml", ".sh", ""}
    }
    files = {path.relative_to(ROOT).as_posix() for path in code}
    words = {word for text in code.values() for word in re.findall(r"\w+", text)}
    paths = (path for path, _ in all_settings(Settings, with_groups=True))
    variables = {*map(variable_name, paths), *OTHER_VARIABLES}
    wrong = "`nine.py` and `core.py`; `NoSuchThing`, `EngineCore.nap`, SLIPSTREAM_NAP"
    assert missing_names(wrong, files, {"EngineCore"}, variables) == [
        "SLIPSTREAM_NAP", "nine.py", "NoSuchThing", "EngineCore.nap",
    ]  # fmt: skip
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = {page.name: missing_names(page.read_text(), files, words, variables) for page in pages}
    assert {name: missing for name, missing in found.items() if missing} == {}
