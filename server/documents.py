"""Reads files that people write: YAML, or by their suffix TOML or JSON. What is wrong with one is said in
a line that has the place; a key that a mapping has twice is a fault, since one of its values would be
dropped without a word."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

_MOST_CHARS = 16 << 20


class DocumentError(ValueError):
    """A file that cannot be used. ``place``: where it is at fault, "" where that is not known;
    ``problem``: how, in words that may quote the file; ``kind``: the same in words that quote nothing of
    it."""

    def __init__(self, problem: str, kind: str, place: str = "") -> None:
        super().__init__(f"{place}: {problem}" if place else problem)
        self.place = place
        self.problem = problem
        self.kind = kind


def read_document(path: Path) -> Any:
    """Returns what the file holds; None where it is empty. Raises DocumentError."""
    read, language = _READERS.get(path.suffix.lower(), (_read_yaml, "YAML"))
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARS + 1)
        if len(text) <= _MOST_CHARS:
            return read(text)
        fault = f"has more than {_MOST_CHARS:,} characters"
    except OSError as error:
        fault = str(error.strerror or error)
    except UnicodeDecodeError:
        fault = "is not UTF-8"
    except RecursionError:
        fault = "is nested too deeply"
    except DocumentError:
        raise
    except (yaml.YAMLError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        problem, place = _explained(error, text)
        raise DocumentError(f"not {language}: {problem}", f"not {language}", place) from None
    except ValueError as error:
        raise DocumentError(f"not {language}: {error}", f"not {language}") from None
    raise DocumentError(fault, fault)


def _explained(error: Exception, text: str) -> tuple[str, str]:
    """Returns a parser's words and the place, "" where the words have it."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg, _place(error.lineno, error.colno)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return error.problem or "syntax error", _place(mark.line + 1, mark.column + 1)
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        column = error.position - before.rfind("\n")
        return error.reason, _place(before.count("\n") + 1, column)
    return " ".join(str(error).split()), ""


def _place(line: int, column: int) -> str:
    return f"line {line}, column {column}"


class _Loader(yaml.SafeLoader):
    """YAML's plain types, each key once in a mapping."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except DocumentError:
            raise
        except ValueError as error:
            # What looks like a date or a number and is none.
            raise DocumentError(f"not YAML: {error}", "not YAML", _marked(node)) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # Before what it merges from elsewhere (<<) is put among its own keys, which override that.
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name = key.value if key.tag == _MERGE else self.construct_object(key, deep=True)
            if name in seen:
                raise DocumentError(
                    f"the key {key.value!r} is there twice",
                    "a key is there twice",
                    _marked(key),
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


_MERGE = "tag:yaml.org,2002:merge"


def _marked(node: yaml.Node) -> str:
    return _place(node.start_mark.line + 1, node.start_mark.column + 1)


def _read_yaml(text: str) -> Any:
    # A safe loader; the shorthand for it takes no other class.
    return yaml.load(text, Loader=_Loader)


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_each_once) if text.strip() else None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DocumentError(f"the key {key!r} is there twice", "a key is there twice")
        found[key] = value
    return found


_READERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    ".toml": (tomllib.loads, "TOML"),
    ".json": (_read_json, "JSON"),
}
