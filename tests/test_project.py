"""The wheel, the image, the scripts and the README are complete, and say what is true."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from setuptools import PackageFinder

from drafters.registry import drafter_names
from scripts import house
from server.apis.openai.request import ChatRequest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "engine", "drafters", "compiled", "kvpool", "slipstream")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def normal(requirement: str) -> str:
    """A distribution's name as indexes compare it."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


# --- the distribution ---


def test_every_package_is_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    find = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    assert found == set(PackageFinder.find(str(ROOT), **find))


def test_what_the_packages_import_is_declared() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"]]
    for extra in ("quantized", "client", "otel", "gpu", "kv-events", "gguf", "simulate"):
        wanted += extras[extra]
    # pydantic pins the one build of its core that it works with.
    declared = {normal(each) for each in wanted} | {"pydantic-core"}
    distributions = packages_distributions()
    undeclared = {}
    for module in house.modules(*PACKAGES).values():
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names}:
                owners = {normal(name) for name in distributions.get(top, [])}
                known = top in sys.stdlib_module_names or top in PACKAGES or owners & declared
                if not known:
                    undeclared[top] = module.name
    assert undeclared == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind where it runs."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, check=True, capture_output=True
    )
    return next(target.glob("*.whl"))


def test_the_wheel_brings_the_models_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt")))
    for model in ("target", "draft", "hybrid"):
        kept = {path.name for path in (ROOT / "engine" / "bundled" / model).iterdir()}
        assert {"model.safetensors", "tokenizer.json", "config.json", "README.md"} <= kept
        assert {f"engine/bundled/{model}/{name}" for name in kept} <= names
    assert "engine/templates/smollm2.jinja" in names
    for page in ("playground", "reference"):
        shown = {path.name for path in (ROOT / "server" / page).iterdir()}
        assert "index.html" in shown
        assert {f"server/{page}/{name}" for name in shown} <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert b"slipstream = slipstream.cli:main" in entry_points
    info = wheel.name.split("-")[0] + "-" + wheel.name.split("-")[1] + ".dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info}


def test_the_wheel_runs_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from slipstream import cli; print(cli.__file__); cli.main(['serve', '-h'])"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    # Help ends the process with status 0.
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path / "site"))


# --- the image ---


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's in order, comments dropped and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in text.splitlines() if line)
    return [(word, rest.strip()) for word, _, rest in pairs]


DOCKERFILE = (ROOT / "Dockerfile").read_text()
STEPS = instructions(DOCKERFILE)
STAGES = [index for index, (word, _) in enumerate(STEPS) if word == "FROM"]


def values(word: str, stage: int = 0) -> list[str]:
    """The arguments of all such instructions from the beginning of a stage on."""
    return [rest for each, rest in STEPS[STAGES[stage] :] if each == word]


def test_the_image_is_built_in_stages_from_one_base_and_copies_what_exists() -> None:
    bases = values("FROM")
    assert [stage.split(" AS ")[1] for stage in bases] == ["build", "runtime"]
    assert len({stage.split()[0] for stage in bases}) == 1
    assert re.search(r"(?m)^ARG PYTHON_IMAGE=python:[\d.]+-slim@sha256:[0-9a-f]{64}$", DOCKERFILE)
    # Compilers, caches and sources stay behind in the first stage.
    assert all("pip" not in step for step in values("RUN", -1))
    assert values("COPY", -1) == ["--from=build /opt/slipstream /opt/slipstream"]
    copied = {name for rest in values("COPY")[:-1] for name in rest.split()[:-1]}
    files = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "scripts/constraints.txt"}
    assert set(PACKAGES) | files == copied
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


def test_the_image_serves_as_nobody_special_and_answers_probes_and_signals() -> None:
    pairs = (pair.partition("=") for rest in values("ENV", -1) for pair in rest.split())
    environment = {name: value for name, _, value in pairs}
    # A number, so that Kubernetes can tell that it is not root's.
    (user,) = values("USER", -1)
    assert int(user) > 0
    made = " ".join(values("RUN", -1))
    assert f"--uid {user} " in made
    assert (values("EXPOSE", -1), values("STOPSIGNAL", -1)) == (["8000"], ["SIGTERM"])
    # A shell in between would keep the signal to itself.
    assert json.loads(values("ENTRYPOINT", -1)[0]) == ["slipstream", "serve"]
    assert environment["SLIPSTREAM_HOST"] == "0.0.0.0"
    assert environment["SLIPSTREAM_PORT"] == "8000"
    command = json.loads(values("HEALTHCHECK", -1)[0].partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    assert "/health" in command[2]
    ast.parse(command[2])
    assert values("VOLUME", -1) == [environment["HF_HOME"]]
    assert f"-o slipstream -g slipstream {environment['HF_HOME']}" in made
    # For the CPU unless told otherwise, and from no place of ours.
    assert "DEVICE=cpu" in values("ARG", -1)
    assert environment["SLIPSTREAM_DEVICE"] == "${DEVICE}"
    assert 'TORCH_INDEX=""' in values("ARG")
    assert not re.search(r"https?://(?!127\.0\.0\.1)", DOCKERFILE)


# --- the scripts ---


@pytest.mark.parametrize("name", ["scripts/serve", "scripts/test", "scripts/lint", ".ci/run"])
def test_scripts_are_sound_and_executable(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


# --- the README ---

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_request_is_one_the_server_takes() -> None:
    bodies = re.findall(r"-d @- <<'JSON'\n(.*?)\nJSON\n", README, re.DOTALL)
    assert bodies
    for body in bodies:
        request = ChatRequest.model_validate_json(body)
        assert request.stream
        assert request.stream_options is not None
        assert request.stream_options.include_usage


def test_the_readme_lists_all_drafters() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) >= set(drafter_names())


def test_the_readme_links_to_what_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []
