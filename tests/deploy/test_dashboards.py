"""The committed dashboards are what the code makes, and can be read by who did not write them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.dashboards.__main__ import TARGET, main, stale_files
from worlds.deploy_tools import DEPLOY
from worlds.expressions import DASHBOARDS, folded_panels, panels, variable_queries


def test_the_committed_json_is_current() -> None:
    assert main(["--check"]) == 0


def test_a_changed_a_missing_and_a_foreign_file_are_stale(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    assert stale_files(tmp_path) == []
    changed = tmp_path / "speculation.json"
    changed.write_text(changed.read_text().replace("Wasted", "Spent"))
    (tmp_path / "serving.json").unlink()
    (tmp_path / "drawn-by-hand.json").write_text("{}")
    assert stale_files(tmp_path) == ["drawn-by-hand.json", "serving.json", "speculation.json"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_own_model_reads_the_json(name: str) -> None:
    read = Dashboard.from_json(DASHBOARDS[name])
    assert read.uid == f"slipstream-{name}"
    assert read.title is not None
    assert len(read.panels or []) == len(DASHBOARDS[name]["panels"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_says_what_it_shows_and_in_which_unit(name: str) -> None:
    rows = [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] == "row"]
    ids = [panel["id"] for panel in [*rows, *panels(DASHBOARDS[name])]]
    assert len(set(ids)) == len(ids)
    for panel in panels(DASHBOARDS[name]):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_side_by_side(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    rows = [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] == "row"]
    for panel in [*rows, *panels(DASHBOARDS[name])]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {
            (at["x"] + across, at["y"] + down)
            for across in range(at["w"])
            for down in range(at["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own


def test_what_not_every_server_has_is_folded_into_rows_that_say_what_they_need() -> None:
    """A gateway, tenants, a GPU, layers with states: all the queries of theirs, and no others."""
    special = re.compile("slipstream_(gateway|tenant|gpu|state)_")
    for dashboard in DASHBOARDS.values():
        folded = folded_panels(dashboard)
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expr = target["expr"]
                # A sum that takes a gateway's part where there is one.
                needs = bool(special.search(expr)) and "slipstream_draining" not in expr
                assert needs == (panel in folded), panel["title"]
    titles = {
        row["title"]
        for dashboard in DASHBOARDS.values()
        for row in dashboard["panels"]
        if row["type"] == "row" and row["collapsed"]
    }
    assert titles == {
        "Ingress under Ray Serve: needs an ingress of deploy/ray",
        "By tenant: needs a file of keys (--api-keys-file)",
        "GPU: needs a server on a CUDA device",
        "Recurrent layers: needs a model whose layers keep a state",
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_what_is_chosen_above_decides_what_is_queried(name: str) -> None:
    dashboard = DASHBOARDS[name]
    variables = [each["name"] for each in dashboard["templating"]["list"]]
    assert variables[:3] == ["datasource", "model", "instance"]
    narrowed = {where: selector for where, selector, _ in variable_queries()}
    assert 'model_name=~"$model"' in narrowed[f"{name}: instance"]
    for panel in panels(dashboard):
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            expr = target["expr"]
            assert expr.count("{") == expr.count('{instance=~"$instance"'), expr


def test_grafana_finds_source_and_dashboards_where_compose_puts_them() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    compose = (DEPLOY / "compose.yaml").read_text()
    provider = (provisioning / "dashboards" / "slipstream.yaml").read_text()
    assert "path: /etc/dashboards" in provider
    assert "./grafana/dashboards:/etc/dashboards:ro" in compose
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in compose
    source = (provisioning / "datasources" / "prometheus.yaml").read_text()
    assert "url: http://prometheus:9090" in source
