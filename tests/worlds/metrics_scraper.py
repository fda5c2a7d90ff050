"""How the endpoint picker of an inference gateway reads ``/metrics``: the text format alone, by the rules
from before names could be anything, and then single figures by ``name{label=value}``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

TYPES = {"counter", "gauge", "histogram", "summary", "untyped"}
VLLM = {
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "loraSpec": "vllm:lora_requests_info",
    "cacheInfoSpec": "vllm:cache_config_info",
}
"""What the picker looks for where pods do not say otherwise."""
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_SPEC = re.compile(rf'({_NAME})(?:\{{(\w+)="?([^"}}]*)"?\}})?')
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


@dataclass
class Family:
    kind: str = "untyped"
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)


def families(text: str) -> dict[str, Family]:
    """By name. Raises AssertionError where the picker would refuse the whole answer."""
    assert text.endswith("\n"), "the last line does not end"
    found: dict[str, Family] = {}
    typed, helped = set[str](), set[str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped, f"a second HELP for {name}"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert re.fullmatch(_NAME, name), name
            assert kind in TYPES, line
            assert name not in typed, f"a second TYPE for {name}"
            assert not (name in found and found[name].samples), f"{name}: its type comes too late"
            typed.add(name)
            found[name] = Family(kind)
        elif line and not line.startswith("#"):
            _add(found, line)
    return found


def _add(found: dict[str, Family], line: str) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match is not None, line
    name, inside, value = match.groups()
    labels = dict(_LABEL.findall(inside or ""))
    assert _LABEL.sub("", inside or "") == "", line
    for own, family in found.items():
        if name in (own + suffix for suffix in _SUFFIXES.get(family.kind, ())):
            name = own
            break
    found.setdefault(name, Family()).samples.append((labels, float(value)))


def extracted(text: str, engine: dict[str, str]) -> dict[str, Any]:
    """What the picker knows of an endpoint afterwards. Raises AssertionError where it would log an error
    instead; figures of LoRA may be missing."""
    known = families(text)
    parts = {
        "waiting": "queuedRequestsSpec",
        "running": "runningRequestsSpec",
        "kv_usage": "kvUsageSpec",
        "block_size": "cacheBlockSizeSpec",
        "num_blocks": "cacheNumBlocksSpec",
    }
    seen: dict[str, Any] = {
        name: _latest(known, engine[spec])[1] for name, spec in parts.items() if engine.get(spec)
    }
    if engine.get("cacheInfoSpec"):
        labels, _ = _latest(known, engine["cacheInfoSpec"])
        seen |= {
            "block_size": int(labels["block_size"]),
            "num_blocks": int(labels["num_gpu_blocks"]),
        }
    return seen


def _latest(known: dict[str, Family], spec: str) -> tuple[dict[str, str], float]:
    match = _SPEC.fullmatch(spec)
    assert match is not None, spec
    name, label, value = match.groups()
    family = known[name]
    assert family.kind in ("gauge", "counter"), f"{name} is no single figure"
    fitting = [each for each in family.samples if label is None or each[0].get(label) == value]
    assert fitting, f"nothing fits {spec}"
    # None has a time of its own, and then the first one counts.
    return fitting[0]
