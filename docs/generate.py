"""Writes the tables of docs/settings.md and docs/metrics.md from the code: ``python -m docs.generate``.

Between a page's ``<!-- generated -->`` marks stands what the code says; the rest is written by hand.
tests/docs checks that the tables are current.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from prometheus_client import Metric
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.info import EngineInfo
from server.metrics import Metrics
from server.settings import Settings

DOCS = Path(__file__).resolve().parent
START, END = "<!-- generated -->\n", "<!-- end -->"


def settings_table() -> str:
    lines = ["| flag | type | default | |", "| --- | --- | --- | --- |"]
    for path, field in _settings(Settings, ()):
        name = ".".join(path).replace("_", "-")
        flag = "`MODEL`" if path == ("model",) else f"`--{name}`"
        lines.append(
            f"| {flag} | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        )
    return "\n".join(lines) + "\n"


def _settings(
    model: type[BaseModel], prefix: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, (*prefix, name))
        else:
            yield (*prefix, name), field


def _type(field: FieldInfo) -> str:
    text = " or ".join(_type_names(field.annotation))
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    bounds = [
        f"{signs[type(each)]} {_bound(each)}" for each in field.metadata if type(each) in signs
    ]
    return " ".join([text, ", ".join(bounds)]).strip()


def _bound(constraint: Any) -> Any:
    return next(getattr(constraint, each.name) for each in fields(constraint))


def _type_names(kind: Any) -> list[str]:
    origin = get_origin(kind)
    if origin is Literal:
        return [f"`{value}`" for value in get_args(kind)]
    if origin in (Union, types.UnionType):
        parts = [name for each in get_args(kind) for name in _type_names(each)]
        return [name for name in parts if name]
    if origin is list:
        return [f"list of {' or '.join(_type_names(get_args(kind)[0]))}"]
    if origin is dict:
        return ["object"]
    if kind is type(None):
        return [""]
    if kind is Any:
        return ["text"]
    names = {"bool": "boolean", "int": "integer", "float": "number", "str": "text"}
    return [names.get(kind.__name__, "text")]


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[]", "`[]`")


def metrics_table() -> str:
    lines = ["| metric | type | labels | |", "| --- | --- | --- | --- |"]
    for name, kind, labels, text in exported_metrics():
        named = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {kind} | {named} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def exported_metrics() -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name as scraped, type, labels, help) of all that a server on a GPU exports, sorted."""
    found = []
    for collector in make_metrics().registry._collector_to_names:
        labels = tuple(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            names = labels or _info_labels(family)
            found.append((f"{family.name}{suffix}", family.type, names, family.documentation))
    return sorted(found)


def _info_labels(family: Metric) -> tuple[str, ...]:
    return tuple(family.samples[0].labels) if family.type == "info" else ()


def make_metrics() -> Metrics:
    info = EngineInfo(
        model="model",
        vocab_size=8,
        max_model_len=8,
        max_num_nodes=8,
        eos_token_ids=(0,),
        drafters={},
        device="cuda",
        dtype="bfloat16",
        num_blocks=8,
        block_size=8,
        num_parameters=8,
        determinism="fast",
        exact_verified=None,
    )
    return Metrics(info, "model", lambda: True, lambda: {"used": 0.0})


TABLES = {"settings.md": settings_table, "metrics.md": metrics_table}


def with_table(text: str, table: str) -> str:
    """The page with its table replaced. Raises ValueError where a mark is missing."""
    head, start, rest = text.partition(START)
    _, end, tail = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the page lacks {START.strip()} or {END}")
    return f"{head}{START}\n{table}\n{END}{tail}"


def main() -> None:
    for name, make in TABLES.items():
        page = DOCS / name
        page.write_text(with_table(page.read_text(encoding="utf-8"), make()), encoding="utf-8")


if __name__ == "__main__":
    main()
