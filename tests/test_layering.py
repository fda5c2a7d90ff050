"""Who may import whom, checked on the source and, where imports hide in imports, by running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "server": {"server", "engine", "drafters"},
    "engine": {"engine", "drafters", "kvpool"},
    "drafters": {"drafters"},
    "kvpool": {"kvpool"},
}
WEB = {"fastapi", "starlette", "pydantic", "pydantic_settings", "prometheus_client", "uvicorn"}
MODEL = {"torch", "transformers", "safetensors"}
PLAIN = [
    "engine.acceptance",
    "engine.config",
    "engine.cost_model",
    "engine.gamma",
    "engine.noise",
    "engine.params",
    "engine.rejection",
    "engine.request",
    "engine.scheduler",
    "engine.speculation",
    "engine.verifier",
    "drafters.estimator",
    "drafters.registry",
    "kvpool.block_pool",
    "kvpool.prefix_cache",
]
MAX_LINES = 400


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imported_names(source: str) -> Iterator[str]:
    """Full names of all imported modules, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this project"
            assert node.module is not None
            yield node.module


def top_level_imports(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_names(path.read_text(encoding="utf-8"))}


def run_without(blocked: set[str], statement: str) -> subprocess.CompletedProcess[str]:
    """Runs a statement in a new interpreter in which importing ``blocked`` fails."""
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(blocked)})); {statement}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_walk_finds_imports_wherever_they_are() -> None:
    source = "import a.b, c\nfrom d.e import f\ndef g():\n    if True:\n        from h import i\n"
    assert list(imported_names(source)) == ["a.b", "c", "d.e", "h"]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    files = sources(package)
    assert files
    forbidden = (set(MAY_IMPORT) | {"bench", "training", "tests"}) - MAY_IMPORT[package]
    found = {path.name: top_level_imports(path) & forbidden for path in files}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("package", ["engine", "drafters", "kvpool"])
def test_only_the_server_knows_the_web(package: str) -> None:
    found = {path.name: top_level_imports(path) & WEB for path in sources(package)}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_block_is_effective() -> None:
    result = run_without({"torch"}, "import engine.attention")
    assert result.returncode != 0
    assert "torch" in result.stderr


@pytest.mark.parametrize("module", PLAIN)
def test_plain_modules_run_without_torch(module: str) -> None:
    result = run_without(MODEL, f"import {module}")
    assert result.returncode == 0, result.stderr


def test_the_command_line_needs_no_torch_to_explain_itself() -> None:
    result = run_without(MODEL, "from server.cli import main; main(['serve', '--help'])")
    assert result.returncode == 0, result.stderr
    assert "slipstream serve" in result.stdout


def test_the_engine_runs_without_the_web() -> None:
    result = run_without(WEB, "import engine.build")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", [*MAY_IMPORT, "bench", "training"])
def test_files_stay_readable(package: str) -> None:
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)
    }
    assert {path: count for path, count in lengths.items() if count > MAX_LINES} == {}
    assert not {path.name for path in lengths} & {"utils.py", "util.py", "helpers.py", "misc.py"}


def test_the_terminal_client_needs_no_engine() -> None:
    """It talks to servers elsewhere: nothing of the engine, the drafters or the web framework."""
    files = sources("server/client")
    assert files
    found = {
        path.name: {name for name in names if name.partition(".")[0] in {"engine", "drafters"}}
        for path in files
        if (names := set(imported_names(path.read_text(encoding="utf-8"))))
    }
    assert {name: names for name, names in found.items() if names} == {}
    modules = ", ".join(f"server.client.{path.stem}" for path in files if path.stem != "__init__")
    result = run_without(MODEL | WEB | {"engine", "drafters", "kvpool"}, f"import {modules}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("missing", ["httpx", "rich"])
def test_a_missing_client_library_is_named_with_its_extra(missing: str) -> None:
    code = "from server.cli import main; sys.exit(main(['complete', 'x']))"
    result = run_without({missing}, code)
    assert result.returncode == 2
    assert f"needs {missing}: pip install 'slipstream-llm[client]'" in result.stderr
    assert "Traceback" not in result.stderr
