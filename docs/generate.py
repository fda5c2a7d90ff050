"""Writes the tables of docs/*.md that the code knows: ``python -m docs.generate``.

Between ``<!-- generated: NAME -->`` and ``<!-- end -->`` stands what the function of that name in
``TABLES`` says; the rest of a page is written by hand. tests/docs checks that the tables are current.
"""

from __future__ import annotations

import json
import re
import types
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Metric
from pydantic.fields import FieldInfo

from bench import scoreboard
from deploy.ray.figures import Figures
from drafters.options import SpeculativeParams
from drafters.registry import drafter_settings
from engine.request.info import EngineInfo, StatesInfo
from engine.sampling.processor import parameters
from engine.speculation.gamma import gamma_policy_names
from server.apis.anthropic.blocks import Block, InputMessage
from server.apis.anthropic.request import CustomTool, MessagesRequest
from server.apis.ollama.request import OllamaGenerateRequest
from server.apis.openai.request import ChatRequest, CompletionRequest
from server.apis.responses.request import ResponsesRequest
from server.app import routers
from server.metrics.aliases import aliases
from server.metrics.prometheus import Metrics
from server.request.body import Body, Hint
from server.request.chat import WITHOUT_EFFECT, CommonFields, EventOptions, ReasoningOptions
from server.request.messages import ChatMessage, TextPart
from server.setting_names import all_settings, flag_name
from server.settings import with_drafters
from server.tenants.keys import TenantEntry
from slipstream.tools.models.recommended import RECOMMENDED, table

DOCS = Path(__file__).resolve().parent
ExportedMetric: TypeAlias = tuple[str, str, tuple[str, ...], str]
"""Name as scraped, type, labels and help."""
_MARKED = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def settings_table() -> str:
    """Returns a row for each setting, and one for all that are requests' fields, which api.md has."""
    lines = ["| flag | type, default | |", "| --- | --- | --- |"]
    fields_of: dict[str, list[str]] = {"sampling": [], "speculative": []}
    for path, field in all_settings(with_drafters(drafter_settings())):
        flag = "`MODEL`" if path == ("model",) else f"`{flag_name(path)}`"
        if path[0] in fields_of:
            fields_of[path[0]].append(flag)
            continue
        kind = ", ".join(filter(None, (_type(field), _default(field))))
        lines.append(f"| {flag} | {kind} | {_cell(field.description or '')} |")
    for name, flags in fields_of.items():
        lines.append(
            f"| {', '.join(flags)} | as the fields | Defaults of [fields](api.md#{name}). |"
        )
    return "\n".join(lines) + "\n"


def _type(field: FieldInfo) -> str:
    text = " or ".join(_type_names(field.annotation))
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    bounds = [
        f"{signs[type(each)]} {_bound(each)}"
        for each in field.metadata
        if type(each) in signs and abs(_bound(each)) < 2**31 - 1
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
    names = {
        "bool": "boolean",
        "int": "integer",
        "ByteSize": "bytes",
        "float": "number",
        "str": "text",
    }
    return [names.get(kind.__name__, "text")]


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _cell(text: str) -> str:
    text = " ".join(text.split())
    return text.replace("|", "\\|").replace("[]", "`[]`")


def metrics_table() -> str:
    return _metrics_table(exported_metrics())


def gateway_metrics_table() -> str:
    found = _described(Figures().registry)
    return _metrics_table(
        sorted((name, kind, ("ingress", *labels), text) for name, kind, labels, text in found)
    )


def _metrics_table(found: list[ExportedMetric]) -> str:
    """Returns the table. All of a type that are ours under vLLM's name share a row, as a process's do."""
    own = {text for name, _, _, text in found if not name.startswith("vllm:")}
    rows: dict[str, list[str]] = {}
    for name, kind, labels, text in found:
        about = "as ours" if name.startswith("vllm:") and text in own else _cell(text)
        usual = (
            "Prometheus' usual ones, on Linux, of the server's own process, without the engine's."
        )
        about = usual if name.startswith("process_") else about
        named = ", ".join(f"`{label}`" for label in labels)
        key = f"{kind}{named and f' by {named}'} | {about}"
        rows.setdefault(key if about != _cell(text) else f"{key}\0{name}", []).append(f"`{name}`")
    lines = ["| metric | type, labels | |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {key.split(chr(0))[0]} |" for key, names in rows.items()]
    return "\n".join(lines) + "\n"


def exported_metrics() -> list[ExportedMetric]:
    """Returns all metrics of a server on a GPU, sorted."""
    own = make_metrics().registry
    # What the prometheus client makes families of outside a registry knows its labels itself.
    other = [(each, each._labelnames) for each in aliases(own.collect(), "model")]  # type: ignore[attr-defined]
    return sorted([*_described(own), *(_exported(*each) for each in other)])


def _described(registry: CollectorRegistry) -> list[ExportedMetric]:
    return [
        # Families of our own making know their labels; of others' only the collector does.
        _exported(
            family, tuple(getattr(family, "_labelnames", getattr(collector, "_labelnames", ())))
        )
        for collector in registry._collector_to_names
        for family in collector.collect()
    ]


def _exported(family: Metric, labels: tuple[str, ...]) -> ExportedMetric:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    names = labels or _info_labels(family)
    return f"{family.name}{suffix}", family.type, names, family.documentation


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
        max_num_open=8,
        num_parameters=8,
        determinism="fast",
        attention_backend="sdpa",
        exact_verified=None,
        states=StatesInfo(1, 1, 1, 1),
    )
    return Metrics(info, "model", lambda: True)


def endpoints_table() -> str:
    rows: dict[str, list[str]] = {}
    for route in (route for router in routers() for route in router.routes):
        assert isinstance(route, APIRoute)
        path = route.path.replace(":path", "")
        same = rows.setdefault(_cell((route.endpoint.__doc__ or "").strip()), [])
        same += [f"`{method} {path}`" for method in sorted(route.methods)]
    lines = ["| endpoint | |", "| --- | --- |"]
    lines += [f"| {', '.join(same)} | {text} |" for text, same in rows.items()]
    return "\n".join(lines) + "\n"


def speculative_table() -> str:
    lines = ["| field | default | range | |", "| --- | --- | --- | --- |"]
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
    for each in fields(SpeculativeParams):
        about = each.metadata
        choices = gamma_policy_names() if each.name == "adaptive_depth" else about["choices"] or ()
        span = [f"`{choice}`" for choice in choices]
        span += [signs[kind].format(n) for kind, n in about["bounds"].items() if kind in signs]
        default = str(each.default).lower() if isinstance(each.default, bool) else each.default
        shown = f"`{default}`" if isinstance(default, str | int | float) else ""
        lines.append(
            f"| `{each.name}` | {shown} | {', '.join(span)} | {_cell(about['description'])} |"
        )
    return "\n".join(lines) + "\n"


def sampling_table() -> str:
    lines = ["| field | type, default | |", "| --- | --- | --- |"]
    for each in parameters():
        kind = _type(FieldInfo.from_annotation(each.type))
        default = "" if each.default in ([], {}, None) else f", `{each.default:g}`"
        lines.append(f"| `{each.name}` | {kind}{default} | {_cell(each.description)} |")
    return "\n".join(lines) + "\n"


REQUESTS = (CommonFields, OllamaGenerateRequest)
PARTS: dict[str, type[Body]] = {
    "all requests": CommonFields,
    "`stream_options`": EventOptions,
    "`reasoning`": ReasoningOptions,
    "messages of chats": ChatMessage,
    "text parts of chats": TextPart,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "messages of Anthropic's API": InputMessage,
    "their blocks": Block,
    "their tools": CustomTool,
    "`/api/chat`, `/api/generate`": OllamaGenerateRequest,
}


def hints_table() -> str:
    bodies = {
        "completions": CompletionRequest,
        "chats": ChatRequest,
        "responses": ResponsesRequest,
        "messages": MessagesRequest,
    }
    of: dict[str, list[str]] = {}
    about: dict[str, tuple[FieldInfo, Hint]] = {}
    for name, body in bodies.items():
        for path, *found in body.hint_fields():
            of.setdefault(path, []).append(name)
            about[path] = found[0], found[1]
    rows: dict[str, list[str]] = {}
    for path, (field, hint) in about.items():
        where = "all" if len(of[path]) == len(bodies) else ", ".join(of[path])
        text = "" if hint.is_for_template else field.description or ""
        rows.setdefault(f"{_outcome(hint)} | {text}", []).append(f"`{path}` ({where})")
    lines = ["| fields | what comes of it | |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(same)} | {row} |" for row, same in rows.items()]
    return "\n".join(lines) + "\n"


def _outcome(hint: Hint) -> str:
    if hint.is_for_template:
        names = sorted({hint.variable, *hint.switches} - {""})
        read = " or ".join(f"`{each}`" for each in names)
        return f"for a template that reads {read}, else listed"
    return f"listed{_unless(hint.does)}"


def _unless(does: tuple[Any, ...]) -> str:
    # 1 and 1.0 are two values to Python and one to a client.
    done = " or ".join(dict.fromkeys(f"`{json.dumps(each).removesuffix('.0')}`" for each in does))
    return f", unless {done}" if done else ""


def without_effect_table() -> str:
    lines = ["| in | fields |", "| --- | --- |"]
    for place, body in PARTS.items():
        shared = WITHOUT_EFFECT if body is not CommonFields and issubclass(body, REQUESTS) else {}
        groups: dict[str, list[str]] = {}
        for name, does in body.without_effect.items():
            if does is not None and name not in {*body.unsupported, *body.model_fields, *shared}:
                groups.setdefault(_unless(does), []).append(f"`{name}`")
        rows = (f"{', '.join(names)}{unless}" for unless, names in groups.items())
        lines += (f"| {'' if number else place} | {row} |" for number, row in enumerate(rows))
    return "\n".join(lines) + "\n"


def tenants_table() -> str:
    lines = ["| field | type, default | |", "| --- | --- | --- |"]
    for name, field in TenantEntry.model_fields.items():
        default = "" if field.is_required() else _default(field)
        kind = ", ".join(filter(None, (_type(field), default)))
        lines.append(f"| `{name}` | {kind} | {_cell(field.description or '')} |")
    return "\n".join(lines) + "\n"


def recommended_table() -> str:
    """Without its column of drafts, which have a table."""
    rows = [{**row, "name": f"`{row['name']}`"} for row in table(memory_speed=50)]
    names = [name for name in rows[0] if name != "drafts"]
    lines = [[each.replace("_", " ") for each in names], ["---"] * len(names)]
    lines += [[str(row[name]) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def recommended_drafts_table() -> str:
    lines = ["| model | drafts |", "| --- | --- |"]
    for each in RECOMMENDED:
        drafts = ", ".join(f"`{draft}`" for draft in each.drafts) or "-"
        lines.append(f"| `{each.name}` | {drafts} |")
    return "\n".join(lines) + "\n"


TABLES = {
    "settings": settings_table,
    "metrics": metrics_table,
    "gateway_metrics": gateway_metrics_table,
    "endpoints": endpoints_table,
    "speculative": speculative_table,
    "sampling": sampling_table,
    "tenants": tenants_table,
    "hints": hints_table,
    "without_effect": without_effect_table,
    "recommended": recommended_table,
    "recommended_drafts": recommended_drafts_table,
    "scoreboard": scoreboard.page,
    "scoreboard_newest": scoreboard.newest_tables,
}


def refreshed(text: str) -> str:
    """A page with its tables as they are now. Raises KeyError for one that is not known."""
    return _MARKED.sub(
        lambda mark: f"<!-- generated: {mark[1]} -->\n\n{TABLES[mark[1]]()}\n<!-- end -->", text
    )


def main() -> None:
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if refreshed(text) != text:
            page.write_text(refreshed(text), encoding="utf-8")


if __name__ == "__main__":
    main()
