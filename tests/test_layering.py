"""Modules import only those that they may, checked on the source and, where imports hide in imports, by
running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "compiled": {"compiled"},
    "drafters": {"drafters", "compiled"},
    "kvpool": {"kvpool"},
    "engine": {"engine", "drafters", "compiled", "kvpool"},
    "server": {"server", "engine", "drafters"},
    "slipstream": {"slipstream", "server", "engine", "drafters", "compiled", "kvpool"},
}
# The rooms of a package, its folders and its own files, from the ground up, and which of the same package
# each of them may import.
ROOMS: dict[str, dict[str, set[str]]] = {
    "compiled": {
        "cache": set(),
        "noise_numbers": set(),
        "records": set(),
        "loops": {"cache", "records"},
        "noise": {"noise_numbers"},
    },
    "engine": {
        "batch": set(),
        "logs": set(),
        "hub": set(),
        "machine": {"hub"},
        "names": {"hub"},
        "request": set(),
        "transfer": set(),
        "config": {"hub", "names", "request"},
        "grammar": {"request"},
        "kernels": set(),
        "weights": {"kernels", "request"},
        "attention": {"batch", "kernels", "request"},
        "states": {"batch", "kernels", "request"},
        "kv_events": {"config", "request"},
        "sampling": {"grammar", "kernels", "request", "transfer"},
        "tokenizer": {"hub", "logs", "names", "request", "weights"},
        "capture": {"attention", "batch", "config", "kernels", "states"},
        "schedule": {"batch", "request", "sampling"},
        "model": {
            "attention",
            "batch",
            "capture",
            "kernels",
            "machine",
            "names",
            "request",
            "states",
            "tokenizer",
            "transfer",
            "weights",
        },
        "speculation": {"config", "grammar", "request", "schedule", "transfer"},
        "verification": {"batch", "kernels", "request", "sampling", "schedule", "transfer"},
        "accounts": {"batch", "kv_events", "request", "schedule", "speculation"},
        "core": {
            "accounts",
            "batch",
            "grammar",
            "kv_events",
            "request",
            "sampling",
            "schedule",
            "speculation",
            "transfer",
            "verification",
        },
        "lora": {"kernels", "model", "request", "weights"},
        "drafting": {
            "attention",
            "batch",
            "capture",
            "config",
            "hub",
            "kernels",
            "lora",
            "machine",
            "model",
            "names",
            "request",
            "sampling",
            "transfer",
            "states",
            "weights",
        },
        "offload": {"config", "drafting", "model", "request"},
        "ranks": {"attention", "batch", "config", "model", "request"},
        "process": {
            "config",
            "core",
            "kernels",
            "logs",
            "lora",
            "machine",
            "names",
            "ranks",
            "request",
            "schedule",
            "speculation",
        },
        "build": {
            "attention",
            "capture",
            "config",
            "core",
            "drafting",
            "grammar",
            "hub",
            "kv_events",
            "logs",
            "lora",
            "machine",
            "model",
            "offload",
            "process",
            "ranks",
            "request",
            "sampling",
            "schedule",
            "speculation",
            "states",
            "tokenizer",
            "verification",
            "weights",
        },
    },
    "drafters": {
        "batch_times": set(),
        "containment": set(),
        "contexts": set(),
        "options": set(),
        "tree": set(),
        "base": {"options", "tree"},
        "estimator": {"tree"},
        "ledger": {"batch_times", "estimator", "tree"},
        "copying": {"base", "contexts", "tree"},
        "grammar": {"base"},
        "merged": {"base", "copying", "tree"},
        "model": {"base", "batch_times", "tree"},
        "registry": {"base"},
        "auto": {"base", "copying", "merged", "tree"},
        "parallel": {"base", "tree"},
        "tables": {"base", "contexts", "tree"},
    },
    "server": {
        "documents": set(),
        "errors": set(),
        "plan": {"errors"},
        "response_store": set(),
        "setting_names": set(),
        "version": set(),
        "formats": {"plan"},
        "metrics": {"plan", "version"},
        "tenants": {"documents", "errors", "plan"},
        "http": {"errors", "metrics"},
        "request": {"errors", "formats", "plan"},
        "reply": {"errors", "formats", "http", "metrics", "plan"},
        "settings": {"documents", "formats", "request", "setting_names"},
        "models": {
            "errors",
            "http",
            "metrics",
            "plan",
            "reply",
            "request",
            "response_store",
            "settings",
            "tenants",
        },
        "endpoints": {"errors", "http", "models", "request", "version"},
        "apis": {
            "endpoints",
            "errors",
            "formats",
            "http",
            "models",
            "plan",
            "reply",
            "request",
            "version",
        },
        "app": {
            "apis",
            "endpoints",
            "errors",
            "http",
            "metrics",
            "models",
            "plan",
            "reply",
            "request",
            "response_store",
            "settings",
            "tenants",
            "version",
        },
        "workers": {
            "app",
            "errors",
            "http",
            "metrics",
            "models",
            "request",
            "response_store",
            "settings",
        },
        "serve": {
            "app",
            "http",
            "metrics",
            "models",
            "request",
            "response_store",
            "settings",
            "tenants",
            "workers",
        },
    },
    "slipstream": {
        "client": set(),
        "lookup_loop": set(),
        "speculative_config": set(),
        "speculative_decoder": {"speculative_config"},
        "tools": {"client"},
        "cli": {"client", "tools"},
    },
}
WEB = {"fastapi", "starlette", "pydantic", "pydantic_settings", "prometheus_client", "uvicorn"}
MODEL = {"torch", "transformers", "safetensors"}
HEAVY = {"torchao", "triton", "sympy", "scipy", "torch._inductor", "torch.distributed.tensor"}
LIGHT = "light_imports(EngineConfig())"
PLAIN = [
    "engine.speculation.acceptance",
    "engine.config",
    "engine.speculation.cost",
    "engine.speculation.gamma",
    "engine.sampling.noise",
    "engine.request.params",
    "engine.verification.rejection",
    "engine.schedule.limits",
    "engine.schedule.request",
    "engine.schedule.scheduler",
    "engine.speculation.manager",
    "engine.verification.match",
    "drafters.estimator",
    "drafters.registry",
    "drafters.merged.merging",
    "kvpool.block_pool",
    "kvpool.prefix_cache",
    "kvpool.slot_file",
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
    names = set(imported_names(path.read_text(encoding="utf-8")))
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
    found = {
        path.relative_to(ROOT).as_posix(): top_level_imports(path) & forbidden for path in files
    }
    assert {name: names for name, names in found.items() if names} == {}


def project_imports() -> dict[str, set[str]]:
    """Every product file's imports of other product files, by full module names."""
    return house.imports_of(house.modules(*MAY_IMPORT))


def room_of(module: str) -> tuple[str, str]:
    """Returns a module's package and room; the room of a package's ``__init__`` is ""."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_the_rooms_below_them(package: str) -> None:
    found = set()
    for module, names in project_imports().items():
        if room_of(module)[0] != package or module == package:
            continue
        room = room_of(module)[1]
        for name in names:
            other_package, other = room_of(name)
            if other_package == package and other not in ROOMS[package][room] | {room, ""}:
                found.add(f"{module} imports {name}")
    assert found == set()


@pytest.mark.parametrize("package", ROOMS)
def test_the_table_of_rooms_stands_from_the_ground_up_and_names_what_there_is(package: str) -> None:
    below: set[str] = set()
    for room, names in ROOMS[package].items():
        assert names <= below, f"{room} stands before a room that it imports"
        below.add(room)
    found = {room_of(module)[1] for module in project_imports() if room_of(module)[0] == package}
    assert below == found - {""}


@pytest.mark.parametrize("package", ["engine", "server"])
def test_few_files_lie_flat(package: str) -> None:
    assert len([path for path in (ROOT / package).glob("*.py") if path.stem != "__init__"]) <= 10


def test_no_api_knows_another() -> None:
    found = set()
    for module, names in project_imports().items():
        package, room, api = (*module.split("."), "", "")[:3]
        if (package, room) == ("server", "apis"):
            others = (name for name in names if name.startswith("server.apis."))
            found |= {(module, name) for name in others if name.split(".")[2] != api}
    assert found == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter(project_imports()).prepare()


@pytest.mark.parametrize("package", ["engine", "drafters", "compiled", "kvpool"])
def test_only_the_server_knows_the_web(package: str) -> None:
    found = {path.name: top_level_imports(path) & WEB for path in sources(package)}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_block_is_effective() -> None:
    result = run_without({"torch"}, "import engine.attention.backend")
    assert result.returncode != 0
    assert "torch" in result.stderr


@pytest.mark.parametrize(
    ("blocked", "statement"),
    [
        # In one interpreter, since every start takes a second: what one of them needs fails for all.
        (MODEL, f"import {', '.join(PLAIN)}"),
        (MODEL, "from slipstream.cli import main; main(['serve', '--help'])"),
        (MODEL | {"numba", "scipy"}, "import server.serve, server.workers.child"),
        (HEAVY, f"from engine.process.light_imports import *\nwith {LIGHT}: import engine.build"),
        (WEB, "import engine.build"),
    ],
)
def test_what_needs_no_model_or_no_web_runs_without(blocked: set[str], statement: str) -> None:
    result = run_without(blocked, statement)
    assert result.returncode == 0, result.stderr
    assert ("slipstream serve" in result.stdout) == ("--help" in statement)


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
    """It talks to servers elsewhere: it has the words of ``speculative``, and nothing else below it."""
    files = sources("slipstream/client")
    assert files
    names = {name for path in files for name in imported_names(path.read_text(encoding="utf-8"))}
    assert {name for name in names if name.partition(".")[0] in MAY_IMPORT} <= {
        "drafters.options",
        *(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files),
    }
    modules = ", ".join(
        f"slipstream.client.{path.stem}" for path in files if path.stem != "__init__"
    )
    result = run_without(MODEL | WEB | {"server", "engine", "kvpool"}, f"import {modules}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("missing", ["httpx", "rich"])
def test_a_missing_client_library_is_named_with_its_extra(missing: str) -> None:
    code = "from slipstream.cli import main; sys.exit(main(['complete', 'x']))"
    result = run_without({missing}, code)
    assert result.returncode == 2
    assert f"needs {missing}: pip install -e '.[client]'" in result.stderr
    assert "Traceback" not in result.stderr
