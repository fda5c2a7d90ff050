"""Alert rules: promtool reads them, runs their unit tests, and no rule is without one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from worlds.deploy_tools import DEPLOY, debian_tool
from worlds.expressions import alerts

pytestmark = pytest.mark.slow

FOLDER = DEPLOY / "prometheus"
CASES = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    command = [debian_tool("promtool"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    result = promtool("check", "config", "prometheus.yml")
    assert result.returncode == 0, result.stderr
    assert "1 rule files found" in result.stdout
    result = promtool("check", "rules", "--lint-fatal", "alerts.yml")
    assert result.returncode == 0, result.stderr
    assert f"{len(alerts())} rules found" in result.stdout


def test_the_rules_unit_tests_pass() -> None:
    result = promtool("test", "rules", "alerts_test.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", alerts())
def test_every_alert_has_a_quiet_and_a_firing_case(name: str) -> None:
    outcomes = [
        bool(rule["exp_alerts"])
        for case in CASES
        if case["name"] == name
        for rule in case["alert_rule_test"]
        if rule["alertname"] == name
    ]
    assert sorted(outcomes) == [False, True]


@pytest.mark.parametrize("name", alerts())
def test_every_alert_says_how_grave_it_is_and_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "$labels.instance" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
