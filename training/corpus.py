"""Collect permissively licensed Python functions, classes and short modules from this machine.

The corpus is read from two places: the standard library (PSF licence) and installed
packages whose own metadata declares an MIT, BSD, Apache or PSF licence.  Every source
package is written down with its version and licence.  Whole files are held out by a hash
of their path, so nothing from a held-out file is ever trained on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata as metadata
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

HELD_OUT_PERCENT = 3
MAX_CHARS = 2400  # roughly 700 tokens; longer definitions are left out
MIN_CHARS = 60
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|0BSD|ISC)\b", re.I)
COPYLEFT = re.compile(
    r"GPL|MPL|Mozilla|CDDL|EUPL|AGPL|proprietary|Commons|LicenseRef|CNRI|Zlib", re.I
)
# Permissive, but repetitive: generated clients, stubs and near-copies of model definitions.
TOO_REPETITIVE = {
    "torch",
    "transformers",
    "openai",
    "altair",
    "bokeh",
    "moto",
    "boto3",
    "pymc",
    "plotly",
    "libcst",
    "hf-xet",
    "dash",
}
# Folders of tests, vendored copies and data tables teach little or carry other licences.
SKIP_PARTS = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|_vendored_packages|idle_test|lib2to3|site-packages|"
    r"locale|locales|examples?|migrations|encodings|__pycache__|dialects|_tzpath|pydoc_data|"
    r"lexers|styles|validators|graph_objs|providers|test_.*|.*_tests?|conftest\.py)(/|$)"
)


@dataclass(frozen=True)
class Source:
    """One package the corpus draws on."""

    name: str
    version: str
    licence: str
    files: int
    units: int


@dataclass(frozen=True)
class Unit:
    """One self-contained piece of code and where it came from."""

    text: str
    path: str
    package: str
    held_out: bool


def is_held_out(path: str) -> bool:
    """Return whether the file at this package-relative path belongs to the held-out share."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def licence_of(dist: metadata.Distribution) -> str | None:
    """Return the declared licence of a distribution if it is clearly permissive."""
    meta = dist.metadata
    fields = [(meta.get_all("License-Expression") or [""])[0]]
    fields += [
        c.split("::")[-1].strip()
        for c in meta.get_all("Classifier") or []
        if c.startswith("License ::") and c.count("::") >= 2
    ]
    if not any(fields):
        first_line = (meta.get_all("License") or [""])[0].strip().splitlines()
        fields.append(first_line[0][:60] if first_line else "")
    text = " / ".join(f for f in fields if f)
    if not PERMISSIVE.search(text) or COPYLEFT.search(text):
        return None
    return text


def _shorten_docstrings(tree: ast.AST, lines: list[str]) -> list[str]:
    """Cut every multi-line docstring down to its first line."""
    cuts: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            continue
        first = node.body[0] if node.body else None
        if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
            continue
        value = first.value.value
        if not isinstance(value, str) or first.lineno == first.end_lineno:
            continue
        summary = next((ln.strip() for ln in value.splitlines() if ln.strip()), "")
        summary = summary.replace("\\", "").replace('"', "'")
        indent = " " * first.col_offset
        replacement = f'{indent}"""{summary}"""' if summary else ""
        if not summary and len(node.body) == 1:
            replacement = f"{indent}pass"
        cuts.append((first.lineno, first.end_lineno or first.lineno, replacement))
    out = list(lines)
    for start, end, replacement in sorted(cuts, reverse=True):
        out[start - 1 : end] = [replacement] if replacement else []
    return out


def _looks_clean(text: str) -> bool:
    """Reject data tables, generated code and text that is not plain ASCII."""
    if not text.isascii() or "\t" in text or not MIN_CHARS <= len(text) <= MAX_CHARS:
        return False
    lines = text.splitlines()
    if max(map(len, lines)) > 110 or len(lines) < 3:
        return False
    letters = sum(c.isalpha() or c in " \n_" for c in text)
    return letters / len(text) > 0.68 and sum(c.isdigit() for c in text) / len(text) < 0.05


def _strip_blank(lines: list[str]) -> str:
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def units_of(source: str) -> Iterator[str]:
    """Yield the clean definitions of a module, and the module itself when it is short.

    Methods of classes that are too long are yielded on their own, dedented, because they
    read like functions.
    """
    try:
        source = _strip_blank(_shorten_docstrings(ast.parse(source), source.splitlines()))
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    whole = _strip_blank(lines)
    if tree.body and _looks_clean(whole) and len(tree.body) > 2:
        yield whole
        return

    def piece(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, indent: int) -> str:
        start = min([node.lineno] + [d.lineno for d in node.decorator_list])
        while start >= 2 and lines[start - 2].lstrip().startswith("# ") and indent == 0:
            start -= 1
        body = lines[start - 1 : node.end_lineno]
        return _strip_blank([ln[indent:] if not ln[:indent].strip() else ln for ln in body])

    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = piece(node, 0)
            if _looks_clean(text):
                yield text
            elif isinstance(node, ast.ClassDef):
                for child in node.body:
                    if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        text = piece(child, child.col_offset)
                        if _looks_clean(text):
                            yield text


def _package_files(dist: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    for item in dist.files or []:
        name = str(item)
        if name.endswith(".py") and not name.startswith("..") and not SKIP_PARTS.search(name):
            yield name, Path(str(dist.locate_file(item)))


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not SKIP_PARTS.search(name) and not name.startswith("ensurepip"):
            yield f"stdlib/{name}", path


def collect(folders: list[str], max_per_package: int) -> tuple[list[Unit], list[Source]]:
    """Read every permissive source and return its deduplicated units and the source list."""
    seen: set[str] = set()
    units: list[Unit] = []
    sources: list[Source] = []
    groups: list[tuple[str, str, str, list[tuple[str, Path]]]] = [
        ("python standard library", sys.version.split()[0], "PSF-2.0", list(_stdlib_files()))
    ]
    dists = {d.metadata["Name"]: d for d in metadata.distributions(path=folders)}
    for name, dist in sorted(dists.items()):
        licence = licence_of(dist)
        if licence and name not in TOO_REPETITIVE:
            groups.append((name, dist.version, licence, sorted(_package_files(dist))))
    for name, version, licence, files in groups:
        found: list[Unit] = []
        for rel, path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if not text.isascii() and len(text) > 200_000:
                continue
            for unit in units_of(text):
                key = hashlib.sha256(re.sub(r"\s+", "", unit).encode()).hexdigest()
                if key not in seen:
                    seen.add(key)
                    found.append(Unit(unit, rel, name, is_held_out(rel)))
        random.Random(name).shuffle(found)
        kept = found[:max_per_package]
        units += kept
        if kept:
            sources.append(Source(name, version, licence, len({u.path for u in kept}), len(kept)))
    return units, sources


def main() -> None:
    """Write train.jsonl, heldout.jsonl and sources.json into the output folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--site", action="append", default=[], help="folder of packages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-per-package", type=int, default=4000)
    args = parser.parse_args()
    folders = args.site or [sysconfig.get_paths()["purelib"]]
    units, sources = collect(folders, args.max_per_package)
    args.out.mkdir(parents=True, exist_ok=True)
    for split, held in (("train", False), ("heldout", True)):
        with open(args.out / f"{split}.jsonl", "w") as handle:
            for unit in units:
                if unit.held_out == held:
                    row = {"text": unit.text, "path": unit.path, "package": unit.package}
                    handle.write(json.dumps(row) + "\n")
    (args.out / "sources.json").write_text(json.dumps([asdict(s) for s in sources], indent=1))
    chars = sum(len(u.text) for u in units)
    print(f"{len(units)} units, {chars / 1e6:.1f} M characters, {len(sources)} packages")


if __name__ == "__main__":
    main()
