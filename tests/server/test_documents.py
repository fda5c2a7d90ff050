"""Files that people write: what is wrong with one is said with the place, and quoted only where asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from server.documents import DocumentError, read_document

IS_BEFORE_313 = sys.version_info < (3, 13)
"""Where json names what comes behind a trailing comma, not the comma."""


def read(folder: Path, name: str, text: str) -> Any:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_document(path)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("a.yaml", "", None),
        ("a.json", " \n", None),
        ("a.yaml", "a: 1\nb: {a: 2}\n", {"a": 1, "b": {"a": 2}}),
        ("a.yaml", '{"a": [1, 2]}', {"a": [1, 2]}),
        ("a.json", '{\n\t"a": 1\n}', {"a": 1}),
        ("a.JSON", '{\n\t"a": 1\n}', {"a": 1}),
        ("a.toml", "a = 1\n", {"a": 1}),
        ("a.yaml", "\ufeffa: 1\n", {"a": 1}),
        ("a.toml", "\ufeffa = 1\n", {"a": 1}),
        # What is merged in is overridden, not given twice.
        ("a.yaml", "x: &x {a: 1}\ny: {<<: *x, a: 2}\n", {"x": {"a": 1}, "y": {"a": 2}}),
    ],
)  # fmt: skip
def test_what_a_file_holds(tmp_path: Path, name: str, text: str, content: Any) -> None:
    assert read(tmp_path, name, text) == content


@pytest.mark.parametrize(
    ("name", "text", "place", "kind"),
    [
        ("a.yaml", "port: [\n", "line 2, column 1", "not YAML"),
        ("a.yaml", "a: 1\n a: 2\n", "line 2, column 3", "not YAML"),
        ("a.yaml", "a: 1\nb: \x01\n", "line 2, column 4", "not YAML"),
        ("a.yaml", "a: !x secret\n", "line 1, column 4", "not YAML"),
        ("a.yaml", "a: 2026-13-45\n", "line 1, column 4", "not YAML"),
        ("a.yaml", "---\na: 1\n---\nb: 2\n", "line 3, column 1", "not YAML"),
        ("a.yaml", "? [a]\n: 1\n", "line 1, column 3", "not YAML"),
        ("a.yaml", "a: {b: 1,\n    b: 2}\n", "line 2, column 5", "a key is there twice"),
        ("a.yaml", "on: 1\ntrue: 2\n", "line 2, column 1", "a key is there twice"),
        ("a.yaml", "[" * 5000, "", "is nested too deeply"),
        ("a.json", '{"a": 1,}', f"line 1, column {8 + IS_BEFORE_313}", "not JSON"),
        ("a.json", '{"a": 1 2}', "line 1, column 9", "not JSON"),
        ("a.json", '{"a": {"b": 1, "b": 2}}', "", "a key is there twice"),
        ("a.json", '{"a": ' * 50_000, "", "is nested too deeply"),
        ("a.json", f'{{"a": {"9" * 5000}}}', "", "not JSON"),
        ("a.toml", "a = \n", "", "not TOML"),
        ("a.toml", "a = 1\na = 2\n", "", "not TOML"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_with_the_place(
    tmp_path: Path, name: str, text: str, place: str, kind: str
) -> None:
    with pytest.raises(DocumentError) as error:
        read(tmp_path, name, text)
    assert (error.value.place, error.value.kind) == (place, kind)
    assert str(error.value).startswith(f"{place}: " if place else error.value.problem)
    assert "\n" not in str(error.value)
    assert "secret" not in error.value.kind


def test_a_file_that_cannot_be_read_is_one_too(tmp_path: Path) -> None:
    for path, problem in (
        (tmp_path, "Is a directory"),
        (tmp_path / "x", "No such file or directory"),
    ):
        with pytest.raises(DocumentError, match=f"^{problem}$"):
            read_document(path)
    (tmp_path / "sparse.yaml").touch()
    os.truncate(tmp_path / "sparse.yaml", 50 << 30)
    with pytest.raises(DocumentError, match=r"^has more than 16,777,216 characters$"):
        read_document(tmp_path / "sparse.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DocumentError, match=r"^is not UTF-8$"):
        read_document(tmp_path / "bytes.yaml")
