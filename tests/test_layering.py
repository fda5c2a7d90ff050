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
    "client": {"client"},
    "tools": {"tools", "client", "engine", "drafters", "kvpool"},
    "slipstream": {"slipstream", "engine", "drafters"},
}
# A module that imports nothing of the project, so that everybody may have its words.
SHARED = {"slipstream.options"}
# The command line is the door to all commands.
DOOR = {"server/cli.py": {"client", "tools"}}
# Wings of a package and the wings of the same package that each may import. "base" is what stands below
# all wings and "top" what stands on them: the package's own files, and BASE says which is which.
WINGS: dict[str, dict[str, set[str]]] = {
    "engine": {
        "base": set(),
        "grammar": {"base"},
        "sampling": {"base", "kernels", "grammar"},
        "verification": {"base", "sampling"},
        "schedule": {"base", "sampling", "verification"},
        "kernels": {"base"},
        "attention": {"base", "kernels"},
        "capture": {"base", "attention", "kernels"},
        "model": {"base", "attention", "kernels", "capture"},
        "drafting": {"base", "sampling", "attention", "capture", "model"},
        "ranks": {"base", "attention", "model"},
        "speculation": {"base", "grammar", "schedule"},
        "kv_events": {"base"},
        "process": {"base", "top"},
        "top": {
            "base",
            "grammar",
            "sampling",
            "verification",
            "schedule",
            "attention",
            "capture",
            "model",
            "kv_events",
            "ranks",
            "drafting",
            "speculation",
        },
    },
    "drafters": {
        "base": set(),
        "copying": {"base"},
        "tables": {"base"},
        "parallel": {"base"},
        "model": {"base"},
        "top": {"base", "copying", "tables", "parallel", "model"},
    },
    "server": {
        "base": set(),
        "formats": {"base"},
        "request": {"base", "formats"},
        "reply": {"base", "formats", "request"},
        "tenants": {"base"},
        "endpoints": {"base", "formats", "request", "reply", "tenants"},
        "connections": {"base"},
        "telemetry": {"base"},
        "top": {
            "base",
            "formats",
            "request",
            "reply",
            "endpoints",
            "connections",
            "tenants",
            "telemetry",
        },
    },
}
BASE = {
    "engine": {
        "backlog",
        "batch",
        "config",
        "errors",
        "events",
        "gguf_file",
        "gguf_tokenizer",
        "info",
        "limits",
        "logs",
        "machine",
        "model_names",
        "noise_numbers",
        "params",
        "pulse",
        "rank",
        "stats",
        "tokenizer",
        "transfer",
    },
    "drafters": {"base", "checks", "contexts", "estimator", "reading", "tree"},
    "server": {
        "errors",
        "metric_aliases",
        "metrics",
        "middleware",
        "openapi",
        "plan",
        "record",
        "version",
    },
}
WEB = {"fastapi", "starlette", "pydantic", "pydantic_settings", "prometheus_client", "uvicorn"}
MODEL = {"torch", "transformers", "safetensors"}
PLAIN = [
    "engine.speculation.acceptance",
    "engine.config",
    "engine.speculation.cost",
    "engine.speculation.gamma",
    "engine.sampling.noise",
    "engine.params",
    "engine.verification.rejection",
    "engine.limits",
    "engine.schedule.fair_queue",
    "engine.schedule.request",
    "engine.schedule.scheduler",
    "engine.speculation.manager",
    "engine.verification.match",
    "drafters.estimator",
    "drafters.registry",
    "kvpool.block_pool",
    "kvpool.prefix_cache",
]
MAX_LINES = 600


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
    names = set(imported_names(path.read_text(encoding="utf-8"))) - SHARED
    return {name.partition(".")[0] for name in names}


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
    found = {}
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        found[name] = (top_level_imports(path) & forbidden) - DOOR.get(name, set())
    assert {name: names for name, names in found.items() if names} == {}


def project_imports() -> dict[str, set[str]]:
    """Every product file's imports of other product files, by full module names."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(*MAY_IMPORT)
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                # ``from package import module`` needs the module, not the package's own file.
                names |= inside & set(files) or {node.module}
        found[module] = (names & set(files)) - {module}
    return found


def wing_of(module: str) -> tuple[str, str]:
    """A module's package and wing, as in ``WINGS``."""
    package, _, rest = module.partition(".")
    first, _, deeper = rest.partition(".")
    if package not in WINGS:
        return package, ""
    if deeper or first in WINGS[package]:
        return package, first
    return package, "base" if first in BASE[package] else "top"


@pytest.mark.parametrize("package", WINGS)
def test_wings_import_only_the_wings_below_them(package: str) -> None:
    found = set()
    for module, names in project_imports().items():
        if wing_of(module)[0] != package or module == package:
            continue
        wing = wing_of(module)[1]
        for name in names:
            other_package, other = wing_of(name)
            if other_package == package and other not in WINGS[package][wing] | {wing}:
                found.add(f"{module} imports {name}")
    assert found == set()


@pytest.mark.parametrize("package", WINGS)
def test_the_table_of_wings_has_no_circle_and_names_what_there_is(package: str) -> None:
    order: list[str] = []
    while len(order) < len(WINGS[package]):
        free = [w for w, below in WINGS[package].items() if w not in order and below <= {*order}]
        assert free, f"the wings of {package} stand in a circle"
        order += free
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders == set(WINGS[package]) - {"base", "top"}
    assert {path.stem for path in (ROOT / package).glob("*.py")} >= BASE[package]


def test_no_files_import_each_other_in_a_circle() -> None:
    imports = project_imports()
    finished: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in finished:
            return
        path.append(module)
        for name in sorted(imports[module]):
            visit(name)
        path.pop()
        finished.add(module)

    for module in sorted(imports):
        visit(module)


@pytest.mark.parametrize("package", ["engine", "drafters", "kvpool"])
def test_only_the_server_knows_the_web(package: str) -> None:
    found = {path.name: top_level_imports(path) & WEB for path in sources(package)}
    assert {name: names for name, names in found.items() if names} == {}


def test_what_everybody_may_import_imports_nothing_of_ours() -> None:
    for module in SHARED:
        assert project_imports()[module] == set()


def test_the_block_is_effective() -> None:
    result = run_without({"torch"}, "import engine.attention.backend")
    assert result.returncode != 0
    assert "torch" in result.stderr


def test_plain_modules_run_without_torch() -> None:
    # In one interpreter, since every start takes a second: what one of them needs fails for all.
    result = run_without(MODEL, f"import {', '.join(PLAIN)}")
    assert result.returncode == 0, result.stderr


def test_the_command_line_needs_no_torch_to_explain_itself() -> None:
    result = run_without(MODEL, "from server.cli import main; main(['serve', '--help'])")
    assert result.returncode == 0, result.stderr
    assert "slipstream serve" in result.stdout


def test_what_stands_in_front_of_an_engine_needs_no_torch() -> None:
    result = run_without(MODEL, "import server.serve, server.worker")
    assert result.returncode == 0, result.stderr


def test_the_engine_runs_without_the_web() -> None:
    result = run_without(WEB, "import engine.build")
    assert result.returncode == 0, result.stderr


def test_what_tests_share_lies_in_worlds() -> None:
    found = set()
    for path in sources("tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for parts in (name.split(".") for name in names):
                # A test's name imported from a product module starts alike: only modules count.
                modules = parts if isinstance(node, ast.Import) else parts[:-1]
                if parts[0] == "tests" or any(
                    part == "conftest" or part.startswith("test_") for part in modules
                ):
                    found.add((path.name, ".".join(parts)))
    assert found == set()


@pytest.mark.parametrize("package", [*MAY_IMPORT, "bench", "training"])
def test_files_stay_readable(package: str) -> None:
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)
    }
    assert {path: count for path, count in lengths.items() if count > MAX_LINES} == {}
    assert not {path.name for path in lengths} & {"utils.py", "util.py", "helpers.py", "misc.py"}


def test_the_terminal_client_needs_no_engine() -> None:
    """It talks to servers elsewhere: nothing of the engine, the drafters or the web framework."""
    files = sources("client")
    assert files
    found = {
        path.name: {name for name in names if name.partition(".")[0] in {"engine", "drafters"}}
        for path in files
        if (names := set(imported_names(path.read_text(encoding="utf-8"))))
    }
    assert {name: names for name, names in found.items() if names} == {}
    modules = ", ".join(f"client.{path.stem}" for path in files if path.stem != "__init__")
    result = run_without(MODEL | WEB | {"engine", "drafters", "kvpool"}, f"import {modules}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("missing", ["httpx", "rich"])
def test_a_missing_client_library_is_named_with_its_extra(missing: str) -> None:
    code = "from server.cli import main; sys.exit(main(['complete', 'x']))"
    result = run_without({missing}, code)
    assert result.returncode == 2
    assert f"needs {missing}: pip install 'slipstream-llm[client]'" in result.stderr
    assert "Traceback" not in result.stderr
