"""Every PromQL expression of dashboards and alerts, answered by a real Prometheus that scrapes a real
server, and an ingress, under load."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import engine.process.runtime
from worlds.deploy_tools import debian_tool
from worlds.expressions import alerts, dashboard_queries, filled, selectors, variable_queries
from worlds.live_prometheus import (
    LiveServer,
    Prometheus,
    ask_ingress,
    live_ingress,
    live_prometheus,
    live_server,
    put_under_load,
    until,
)

pytestmark = pytest.mark.slow


@dataclass
class Watched:
    server: LiveServer
    prometheus: Prometheus
    statuses: dict[int, int]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    debian_tool("prometheus")
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("tenants: [{name: search, key: secret}]")
    with pytest.MonkeyPatch.context() as patch:
        # There is no GPU here; its memory is a gauge like any other.
        memory = {"used": 6e9, "free": 2e9, "allocated": 5e9}
        patch.setattr(engine.process.runtime, "device_memory", lambda _device: memory)
        with (
            live_server("secret", api_keys_file=str(keys)) as live,
            live_ingress() as ingress,
            live_prometheus(
                tmp_path_factory.mktemp("prometheus"), live.address, ingress
            ) as prometheus,
        ):
            # Twice: a rate needs two scrapes of a series, with growth between them.
            prometheus.scrape_again()
            put_under_load(live)
            ask_ingress(ingress)
            prometheus.scrape_again()
            statuses = put_under_load(live)
            ask_ingress(ingress)
            prometheus.scrape_again()
            yield Watched(live, prometheus, statuses)


def finite(watched: Watched, query: str) -> list[float]:
    """The numbers among what a query answers."""
    courses = watched.prometheus.course(query)
    return [value for course in courses for value in course if math.isfinite(value)]


def test_the_load_is_what_the_dashboards_are_for(watched: Watched) -> None:
    assert watched.statuses[400] == 1
    assert watched.statuses[429] >= 1
    assert watched.statuses[200] >= 5
    assert set(watched.statuses) == {200, 400, 429}


def test_every_panel_shows_something(watched: Watched) -> None:
    # The bundled model's layers keep no states.
    queries = [each for each in dashboard_queries() if "slipstream_state_" not in each[1]]
    assert [each for each in queries if not finite(watched, filled(each[1]))] == []


def test_one_server_alone_fills_every_row_that_is_open(watched: Watched) -> None:
    """No gateway before it, and what its keys and its device add is folded too (test_dashboards.py)."""
    address = watched.server.address.replace(".", r"\\.")
    queries = dashboard_queries(only_open=True)
    shown = [finite(watched, filled(query, instance=address)) for _, query in queries]
    assert [each for each, values in zip(queries, shown, strict=True) if not values] == []


def test_shares_are_shares_and_gains_are_gains(watched: Watched) -> None:
    """Figures whose bounds are known lie within them: an expression that divides wrongly does not."""
    bounds = {
        "Acceptance (A)": (0.0, 1.0),
        "Acceptance by drafter (A)": (0.0, 1.0),
        "Accepted per position (A)": (0.0, 1.0),
        "Wasted rows (A)": (0.0, 1.0),
        "Time spent drafting (A)": (0.0, 1.0),
        # A step whose only token is EOS emits none, and rates extrapolate each counter by itself.
        "Tokens per step (A)": (0.9, 20.0),
        "Gamma (A)": (0.0, 16.0),
        "Prefix-cache hits (A)": (0.0, 1.0),
        "KV blocks held (A)": (0.0, 1.0),
        "Engines up (A)": (1.0, 1.0),
        "Replicas that serve (A)": (1.0, 1.0),
        "Draining (A)": (0.0, 0.0),
        "Uneven load (A)": (0.0, 0.0),
        "Affinity hits (A)": (0.0, 1.0),
        "Requests at home (A)": (0.0, 1.0),
        "Errors (A)": (0.0, 0.0),
    }
    seen = set()
    for where, expression in dashboard_queries():
        panel = where.partition(": ")[2]
        if panel in bounds and "_bucket" not in expression:
            low, high = bounds[panel]
            values = finite(watched, filled(expression))
            assert values, where
            assert low - 1e-6 <= min(values), where
            assert max(values) <= high + 1e-6, where
            # A wrong division would lie at a bound all the time.
            if low < high and expression.startswith("clamp("):
                assert min(values) < high, where
                assert max(values) > low, where
            seen.add(panel)
    assert seen == set(bounds)


def test_drafters_and_positions_are_told_apart(watched: Watched) -> None:
    queries = dict(dashboard_queries())
    by_drafter = filled(queries["speculation: Tokens per step by drafter (A)"])
    drafters = {each["metric"]["drafter"] for each in watched.prometheus.vector(by_drafter)}
    assert drafters == {"none", "ngram", "nasd", "prediction"}
    at = filled(queries["speculation: Accepted per position (A)"])
    positions = [each["metric"]["position"] for each in watched.prometheus.vector(at)]
    assert sorted(positions)[:3] == ["00", "01", "02"]


def test_every_variable_offers_something(watched: Watched) -> None:
    offered = {}
    for where, selector, label in variable_queries():
        params = {"match[]": filled(selector)}
        offered[where] = watched.prometheus.ask(f"label/{label}/values", **params)
    assert all(offered.values()), offered
    assert offered["speculation: model"] == ["slipstream-bundled"]
    assert offered["serving: instance"] == [watched.server.address]
    assert offered["fleet: tenant"] == ["search"]


def test_a_healthy_server_alarms_nobody(watched: Watched) -> None:
    (group,) = watched.prometheus.ask("rules")["groups"]
    rules = {rule["name"]: rule for rule in group["rules"]}
    assert set(rules) == set(alerts())
    assert {name: rule["lastError"] for name, rule in rules.items() if "lastError" in rule} == {}
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    firing = {name for name, rule in rules.items() if rule["state"] == "firing"}
    assert firing == set()


def test_a_dead_engine_is_seen_and_every_alert_has_its_input(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the file: the server does not survive it."""

    def fail(_batch: object) -> None:
        raise MemoryError("no engine survives this")

    monkeypatch.setattr(watched.server.engine.core.runner, "forward", fail)
    body = {"prompt": "x", "max_tokens": 4}
    assert watched.server.post("/completions", body) == 503
    # The others after a while: a rate needs the first to have been seen.
    watched.prometheus.scrape_again()
    assert {watched.server.post("/completions", body) for _ in range(9)} == {503}
    dead = alerts()["SlipstreamEngineDead"]["expr"]
    until(lambda: bool(watched.prometheus.vector(dead)), "the engine's death is not seen")
    errors = alerts()["SlipstreamServerErrors"]["expr"]
    until(lambda: bool(watched.prometheus.vector(errors)), "errors are not seen")
    failing = alerts()["SlipstreamChoicesFail"]["expr"]
    until(lambda: bool(watched.prometheus.vector(failing)), "failed choices are not seen")
    started = time.time() - 120
    for name, rule in alerts().items():
        found = selectors(rule["expr"])
        assert found, name
        for selector in found:
            params = {"match[]": selector, "start": started}
            assert watched.prometheus.ask("series", **params), f"{name}: {selector}"
