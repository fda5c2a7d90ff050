"""deploy/compose.yaml, as Docker Compose itself reads it: it checks the specification's schema, fills
in variables and merges, without a daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from worlds.deploy_tools import DEPLOY, ROOT, python_tool

FILE = DEPLOY / "compose.yaml"
PINNED = r":v?\d+\.\d+\.\d+(-slim)?@sha256:[0-9a-f]{64}$"
PASSWORD = "only-in-the-environment"


def compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``docker compose`` without anything of the caller's that would steer it."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [python_tool("docker-compose"), "-f", str(FILE), *arguments]
    return subprocess.run(
        command, env=kept | variables, capture_output=True, text=True, check=False
    )


def read(*arguments: str, **variables: str) -> dict[str, Any]:
    variables = {"GRAFANA_ADMIN_PASSWORD": PASSWORD} | variables
    result = compose(*arguments, "config", "--format", "json", **variables)
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """Those of all profiles."""
    found: dict[str, Any] = read("--profile", "*")["services"]
    assert set(found) == {"slipstream", "slipstream-gpu", "prometheus", "grafana"}
    return found


def test_one_command_starts_the_server_on_the_cpu_and_what_watches_it() -> None:
    assert set(read()["services"]) == {"slipstream", "prometheus", "grafana"}


def test_a_profile_puts_the_server_on_a_gpu_instead() -> None:
    services = read("--profile", "gpu", TORCH_INDEX="somewhere")["services"]
    assert set(services) == {"slipstream-gpu", "prometheus", "grafana"}
    server = services["slipstream-gpu"]
    assert server["build"]["args"] == {"DEVICE": "cuda", "TORCH_INDEX": "somewhere", "MODELS": ""}
    assert server["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_the_password_comes_from_the_environment_or_nothing_starts() -> None:
    result = compose("config", "-q")
    assert result.returncode != 0
    assert "GRAFANA_ADMIN_PASSWORD" in result.stderr
    assert read()["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == PASSWORD


def settings(node: Any) -> Iterator[tuple[str, Any]]:
    """All keys of a YAML file with what they hold."""
    if isinstance(node, dict):
        yield from node.items()
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from settings(child)


def test_no_file_holds_a_secret() -> None:
    assert (DEPLOY / ".env").read_text().splitlines()[1:] == ["COMPOSE_PROFILES=cpu"]
    found = {}
    # Of manifests test_kubernetes.py says it.
    for path in set(DEPLOY.rglob("*.y*ml")) - set((DEPLOY / "kubernetes").rglob("*.yaml")):
        for name, value in settings(yaml.safe_load(path.read_text())):
            if re.search("password|token(?!s)|key|secret", name, re.IGNORECASE):
                found[name] = value
    assert set(found) == {"SLIPSTREAM_API_KEY", "HF_TOKEN", "GF_SECURITY_ADMIN_PASSWORD"}
    # Passed on, or a variable without a default.
    assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", found.pop("GF_SECURITY_ADMIN_PASSWORD"))
    assert set(found.values()) == {None}


def test_the_port_is_opened_to_others_with_a_key_alone() -> None:
    image = (ROOT / "Dockerfile").read_text()
    assert "SLIPSTREAM_ALLOW_OPEN" not in str(re.findall(r"(?m)^(?!#).*", image))
    refused = compose("config", "-q", GRAFANA_ADMIN_PASSWORD=PASSWORD, SLIPSTREAM_BIND="0.0.0.0")
    assert refused.returncode != 0
    assert "set SLIPSTREAM_API_KEY" in refused.stderr
    server = read(SLIPSTREAM_BIND="0.0.0.0", SLIPSTREAM_API_KEY="k")["services"]["slipstream"]
    assert [port["host_ip"] for port in server["ports"]] == ["0.0.0.0"]


def test_an_api_key_reaches_the_server_only_if_there_is_one(services: dict[str, Any]) -> None:
    # Null: taken over from the caller, and not set at all where the caller has none.
    assert services["slipstream"]["environment"]["SLIPSTREAM_API_KEY"] is None
    given = read(SLIPSTREAM_API_KEY="k")["services"]["slipstream"]
    assert given["environment"]["SLIPSTREAM_API_KEY"] == "k"


def test_everything_is_bounded_checked_and_without_privileges(services: dict[str, Any]) -> None:
    for name, service in services.items():
        limits = service["deploy"]["resources"]["limits"]
        assert {"cpus", "memory", "pids"} <= set(limits), name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name
        assert int(service["user"].partition(":")[0]) > 0, name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        assert not service.get("privileged"), name
        assert [port["host_ip"] for port in service["ports"]] == ["127.0.0.1"], name
        # Images of others are pinned.
        assert "build" in service or re.search(PINNED, service["image"]), name


def test_the_server_is_built_and_run_as_the_dockerfile_means(services: dict[str, Any]) -> None:
    image = (ROOT / "Dockerfile").read_text()
    for name in ("slipstream", "slipstream-gpu"):
        service = services[name]
        assert service["build"]["context"] == str(ROOT)
        assert {f"ARG {arg}" for arg in service["build"]["args"]} <= set(
            re.findall(r"^ARG \w+", image, re.MULTILINE)
        )
        assert f"USER {service['user']}" in image
        assert [volume["target"] for volume in service["volumes"]] == ["/models"]
        assert "VOLUME /models" in image
        assert service["stop_grace_period"] == "40s"


def test_variables_name_a_model_and_as_many_threads_as_cores() -> None:
    given = {"SLIPSTREAM_MODEL": "org/name --max-num-seqs 8", "SLIPSTREAM_CORES": "6"}
    server = read(**given)["services"]["slipstream"]
    assert server["command"] == ["org/name", "--max-num-seqs", "8"]
    assert server["environment"]["SLIPSTREAM_NUM_THREADS"] == "6"
    assert server["deploy"]["resources"]["limits"]["cpus"] == 6


def test_prometheus_scrapes_whichever_server_runs(services: dict[str, Any]) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (target,) = jobs["slipstream"]["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert services["slipstream"]["environment"]["SLIPSTREAM_ALLOWED_HOSTS"] == host
    for name in ("slipstream", "slipstream-gpu"):
        assert services[name]["networks"]["default"]["aliases"] == [host]
        assert [each["target"] for each in services[name]["ports"]] == [int(port)]
