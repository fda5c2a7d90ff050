"""The manifests are what Kubernetes takes, hang together, and fit the server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from engine.process.launch import _STOP_SECONDS
from server.app import routers
from server.http.draining import _LAST_BYTES_SECONDS
from server.metrics.prometheus import Metrics
from server.setting_names import all_settings
from server.settings import Settings
from worlds.deploy_tools import DEPLOY, ROOT, find_tool
from worlds.scripted_engine import engine_info

OVERLAYS = {path.name: path for path in sorted((DEPLOY / "kubernetes" / "overlays").iterdir())}
# What clusters run: the oldest that is still looked after, and the newest that there is a schema of.
VERSIONS = ("1.34", "1.37")
# Kinds that Kubernetes is extended by, whose schemas their own projects have.
CUSTOM = {
    "InferencePool": "inference.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}
STEPS = {"resources", "configMapGenerator", "components", "patches", "images"}

Objects = dict[tuple[str, str], dict[str, Any]]


def rendered(folder: Path, objects: Objects | None = None) -> Objects:
    """All objects of a folder by kind and name, as ``kubectl kustomize`` makes them but for the hashes in
    names of config maps."""
    objects = {} if objects is None else objects
    config = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert config.keys() - {"apiVersion", "kind"} <= STEPS, folder
    for path in config.get("resources", []):
        if (folder / path).is_dir():
            rendered(folder / path, objects)
            continue
        for each in yaml.safe_load_all((folder / path).read_text()):
            assert objects.setdefault((each["kind"], each["metadata"]["name"]), each) is each
    for wanted in config.get("configMapGenerator", []):
        data = dict(each.split("=", 1) for each in wanted.get("literals", []))
        data |= {name: (folder / name).read_text() for name in wanted.get("files", [])}
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": wanted["name"]}}
        assert (("ConfigMap", wanted["name"]) in objects) == (wanted.get("behavior") == "merge")
        made = objects.setdefault(("ConfigMap", wanted["name"]), head | {"data": {}})
        made["data"] |= data
    for path in config.get("components", []):
        rendered(folder / path, objects)
    for wanted in config.get("patches", []):
        patched = objects[wanted["target"]["kind"], wanted["target"]["name"]]
        for step in yaml.safe_load((folder / wanted["path"]).read_text()):
            patch(patched, **step)
    for wanted in config.get("images", []):
        for container in containers(objects):
            if container["image"] == wanted["name"]:
                container["image"] = f"{wanted['newName']}:{wanted['newTag']}"
    return objects


def patch(place: Any, op: str, path: str, value: Any) -> None:
    """One operation of JSON Patch (RFC 6902): add or replace."""
    *above, last = (part.replace("~1", "/") for part in path.split("/")[1:])
    for part in above:
        place = place[int(part) if isinstance(place, list) else part]
    if last == "-":
        place.append(value)
    else:
        assert op == "add" or last in place, path
        place[last] = value


def containers(objects: Objects) -> Iterator[dict[str, Any]]:
    for (kind, _), each in objects.items():
        if kind == "Deployment":
            yield from each["spec"]["template"]["spec"]["containers"]


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> Objects:
    return rendered(OVERLAYS[request.param])


def validate(each: dict[str, Any]) -> None:
    if each["kind"] in CUSTOM:
        assert each["apiVersion"] == CUSTOM[each["kind"]]
        return
    for version in VERSIONS:
        kubernetes_validate.validate(each, version, strict=True)


def server_of(objects: Objects) -> tuple[Any, Any]:
    """The pod and its container."""
    pod = objects["Deployment", "slipstream"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    return pod, container


def environment(objects: Objects) -> dict[str, str]:
    """As the container gets it: first from the config map, then its own, in which names are filled in."""
    _, container = server_of(objects)
    (source,) = container["envFrom"]
    settings = objects["ConfigMap", source["configMapRef"]["name"]]["data"]
    own: dict[str, str] = {"POD_IP": "10.0.0.7"}
    for each in container["env"]:
        given = each.get("valueFrom", {})
        if reference := given.get("configMapKeyRef"):
            own[each["name"]] = objects["ConfigMap", reference["name"]]["data"][reference["key"]]
        elif "value" in each:
            own[each["name"]] = re.sub(r"\$\((\w+)\)", lambda m: own[m[1]], each["value"])
        else:
            assert given.keys() <= {"fieldRef", "secretKeyRef"}
    return settings | own


# --- what Kubernetes takes ---


@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_makes_the_same_of_it(name: str) -> None:
    program = find_tool("kubectl")
    if program is None:
        pytest.skip("no kubectl here, whose kustomize judges the renderer of these tests")
    command = [program, "kustomize", str(OVERLAYS[name])]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for kind, own in (expected := rendered(OVERLAYS[name])):
        if kind == "ConfigMap":
            shown = re.sub(rf"\b{own}-[a-z0-9]{{10}}\b", own, shown)
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(shown)}
    assert found == expected


def test_every_object_is_valid(objects: Objects) -> None:
    for each in objects.values():
        validate(each)


def test_labels_select_the_pods_that_they_are_meant_to(objects: Objects) -> None:
    pods = {
        name: each["spec"]["template"]["metadata"]["labels"]
        for (kind, name), each in objects.items()
        if kind == "Deployment"
    }
    for (kind, name), each in objects.items():
        spec = each.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector is not None:
                wanted = selector.get("matchLabels", selector)
                chosen = {pod for pod, own in pods.items() if wanted.items() <= own.items()}
                assert chosen == {name}, (kind, name)


def test_ports_by_name_are_the_containers(objects: Objects) -> None:
    _, container = server_of(objects)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == 8000
    assert f"SLIPSTREAM_PORT={ports['http']}" in (ROOT / "Dockerfile").read_text()
    (own,) = objects["Service", "slipstream"]["spec"]["ports"]
    (watched,) = objects["PodMonitor", "slipstream"]["spec"]["podMetricsEndpoints"]
    assert own["targetPort"] == watched["port"] == "http"


def test_a_policy_says_what_pods_take_and_where_they_go(objects: Objects) -> None:
    policy = objects["NetworkPolicy", "slipstream"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"][0] == {"ports": [{"port": 8000}]}
    assert all("from" in each for each in policy["ingress"][1:])
    names, models = policy["egress"]
    assert {each["port"] for each in names["ports"]} == {53}
    assert models["ports"] == [{"port": 443}]
    # Where clouds hand out credentials to whoever asks from within.
    for private in ("169.254.169.254", "fd00:ec2::254"):
        address = ip_address(private)
        for block in (each["ipBlock"] for each in models["to"]):
            if ip_network(block["cidr"]).version == address.version:
                assert any(address in ip_network(each) for each in block["except"])


# --- what the server takes ---


def test_every_variable_is_a_setting_and_the_server_takes_it(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"SLIPSTREAM_{'__'.join(path).upper()}" for path, _ in all_settings(Settings)}
    variables = environment(objects)
    own = {name for name in variables if name.startswith("SLIPSTREAM_")}
    assert own - names == set()
    for name in own:
        monkeypatch.setenv(name, variables[name])
    settings = Settings()
    config = settings.engine_config()
    pod, container = server_of(objects)
    (keys,) = (each for each in container["volumeMounts"] if each["name"] == "keys")
    assert settings.api_keys_file == f"{keys['mountPath']}/keys.yaml"
    # A little more than all that comes before the end.
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + settings.drain_seconds
    needed += _LAST_BYTES_SECONDS + _STOP_SECONDS
    assert needed < pod["spec"]["terminationGracePeriodSeconds"] <= needed + 10
    limits = container["resources"]["limits"]
    if "nvidia.com/gpu" in limits:
        assert container["image"] == "slipstream:cuda"
        assert int(limits["nvidia.com/gpu"]) == config.tensor_parallel_size
    else:
        assert container["image"] == "slipstream:cpu"
        assert int(limits["cpu"]) == config.num_threads


def test_links_of_services_cannot_be_taken_for_settings(objects: Objects) -> None:
    """A Service of this name would have SLIPSTREAM_PORT set to a URL in all pods of its namespace."""
    pod, _ = server_of(objects)
    assert ("Service", "slipstream") in objects
    assert "port" in Settings.model_fields
    assert pod["spec"]["enableServiceLinks"] is False


def test_probes_ask_what_is_there(objects: Objects) -> None:
    paths = {getattr(route, "path", None) for router in routers() for route in router.routes}
    _, container = server_of(objects)
    # While it drains a server is not ready, and alive.
    wanted = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert {name: container[name]["httpGet"]["path"] for name in wanted} == wanted
    assert {"/ready", "/health", "/metrics"} <= paths


def test_pods_run_without_root_and_write_to_volumes_only(objects: Objects) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    pod, container = server_of(objects)
    assert f"USER {pod['spec']['securityContext']['runAsUser']}\n" in dockerfile
    assert "HF_HOME=/models" in dockerfile
    places = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert places == {"/models", "/kernels", "/tmp"}
    assert environment(objects)["TRITON_CACHE_DIR"] in places
    for (kind, _), each in objects.items():
        if kind == "Deployment":
            spec = each["spec"]["template"]["spec"]
            assert spec["securityContext"]["runAsNonRoot"]
            for inside in spec["containers"]:
                assert inside["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert {"cpu", "memory"} <= inside["resources"]["requests"].keys()
                assert "memory" in inside["resources"]["limits"]


def test_no_object_holds_a_secret(objects: Objects) -> None:
    assert "Secret" not in {kind for kind, _ in objects}
    for each in objects.values():
        for name in each.get("data", {}):
            assert not re.search("password|token|_KEY$", name, re.IGNORECASE)
    _, container = server_of(objects)
    for each in container["env"]:
        if re.search("password|token|key", each["name"], re.IGNORECASE):
            assert each["valueFrom"].keys() == {"secretKeyRef"}


def test_the_autoscaler_reads_a_gauge_of_ours(objects: Objects) -> None:
    families = Metrics(engine_info(), "m", lambda: True).registry.collect()
    kinds = {family.name: family.type for family in families}
    scaler = objects["HorizontalPodAutoscaler", "slipstream"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "slipstream"
    (metric,) = scaler["metrics"]
    assert kinds[metric["pods"]["metric"]["name"]] == "gauge"
    assert "replicas" not in objects["Deployment", "slipstream"]["spec"]


# --- behind a gateway ---


def gateway() -> Objects:
    return rendered(OVERLAYS["gateway"])


def test_the_pool_leads_to_the_picker_and_the_route_to_the_pool() -> None:
    objects = gateway()
    pool = objects["InferencePool", "slipstream"]["spec"]
    _, container = server_of(objects)
    ports = {each["containerPort"] for each in container["ports"]}
    assert {each["number"] for each in pool["targetPorts"]} <= ports
    picker = objects["Service", pool["endpointPickerRef"]["name"]]["spec"]
    assert pool["endpointPickerRef"]["port"]["number"] in {each["port"] for each in picker["ports"]}
    (rule,) = objects["HTTPRoute", "slipstream"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "slipstream")
    pod = objects["Deployment", "endpoint-picker"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--pool-name=slipstream" in container["args"]
    (volume,) = container["volumeMounts"]
    assert f"--config-file={volume['mountPath']}/picker_config.yaml" in container["args"]


def test_the_pickers_configuration_is_sound() -> None:
    objects = gateway()
    config = yaml.safe_load(objects["ConfigMap", "endpoint-picker"]["data"]["picker_config.yaml"])
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    plugins = {each["type"]: each.get("parameters") for each in config["plugins"]}
    assert set(_references(config)) == set(plugins) - {"single-profile-handler"}
    engines = {each["name"] for each in plugins["core-metrics-extractor"]["engineConfigs"]}
    pod, _ = server_of(objects)
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] in engines


def _references(place: Any) -> Iterator[str]:
    if isinstance(place, dict):
        if "pluginRef" in place:
            yield place["pluginRef"]
        for each in place.values():
            yield from _references(each)
    elif isinstance(place, list):
        for each in place:
            yield from _references(each)


def test_events_name_pod_and_model_and_reach_the_picker_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = gateway()
    variables = environment(objects)
    for name, value in variables.items():
        if name.startswith("SLIPSTREAM_"):
            monkeypatch.setenv(name, value)
    settings = Settings()
    topic = settings.engine_config().kv_events_topic
    assert topic == f"kv@10.0.0.7:8000@{settings.served_model_name}"
    assert not settings.kv_events_salted
    _, container = server_of(objects)
    ports = {each["containerPort"] for each in container["ports"]}
    endpoints = (settings.kv_events_endpoint, settings.kv_events_replay_endpoint)
    sockets = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}
    assert ports == {8000} | sockets
    everybody, picker = objects["NetworkPolicy", "slipstream"]["spec"]["ingress"]
    assert everybody == {"ports": [{"port": 8000}]}
    assert {each["port"] for each in picker["ports"]} == sockets
    (source,) = picker["from"]
    labels = objects["Deployment", "endpoint-picker"]["spec"]["template"]["metadata"]["labels"]
    assert source["podSelector"]["matchLabels"].items() <= labels.items()


def test_no_manifest_is_left_out() -> None:
    """Every file belongs to a folder's kustomization."""
    for folder in {path.parent for path in (DEPLOY / "kubernetes").rglob("*.yaml")}:
        text = (folder / "kustomization.yaml").read_text()
        for path in folder.glob("*.yaml"):
            assert path.name == "kustomization.yaml" or path.name in text, path
