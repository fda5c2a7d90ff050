"""The PromQL expressions of dashboards and alerts, as Grafana and Prometheus would send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from worlds.deploy_tools import DEPLOY

FILES = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
DASHBOARDS: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in FILES}
# What Grafana puts in for "All". The interval holds the whole test, however slow the machine is.
_CHOICES = ("$model", "$instance", "$drafter", "$tenant")
VALUES = dict.fromkeys(_CHOICES, ".*") | {"$__rate_interval": "15m"}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All but the headings of rows."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", [])


def folded_panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the panels whose row shows its heading only, until somebody opens it in Grafana."""
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row" and panel["collapsed"]]
    return [panel for row in rows for panel in row["panels"]]


def filled(text: str, **chosen: str) -> str:
    """``text`` with the dashboard's variables replaced: by what is ``chosen``, else by "All"."""
    for name, value in (VALUES | {f"${name}": value for name, value in chosen.items()}).items():
        text = text.replace(name, value)
    # What is left are groups of a regular expression, which Grafana leaves alone.
    assert not re.search(r"\$(?!\d)", text), text
    return text


def dashboard_queries(*, only_open: bool = False) -> list[tuple[str, str]]:
    """(where, expression) of every query, or of those that show unasked."""
    return [
        (f"{name}: {panel['title']} ({target['refId']})", target["expr"])
        for name, dashboard in DASHBOARDS.items()
        for panel in panels(dashboard)
        if not (only_open and panel in folded_panels(dashboard))
        for target in panel["targets"]
    ]


def variable_queries() -> list[tuple[str, str, str]]:
    """(where, selector, label) of every ``label_values``."""
    found = []
    for name, dashboard in DASHBOARDS.items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
                assert match is not None, variable["query"]
                found.append((f"{name}: {variable['name']}", match[1], match[2]))
    return found


def alerts() -> dict[str, Any]:
    """Alert rules by name."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    return {rule["alert"]: rule for rule in rules}


def selectors(expression: str) -> set[str]:
    """The metrics an expression reads, with their label matchers."""
    return set(re.findall(r"\b(?:slipstream_\w+|up)\b(?:\{[^}]*\})?", expression))
