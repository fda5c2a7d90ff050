"""The step as ``COMPILE_SLIPSTREAM=1`` compiles it: its classes may be inherited from by compiled classes
alone, and numba reads none of its functions."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "drafters", "compiled", "kvpool", "slipstream")
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="")
COMPILED: frozenset[str] = frozenset(SETUP["COMPILED"])
# Those that put fakes in the place of compiled classes run on the classes as they are written.
_SUITES = (
    "tests/engine/equality/test_equality_bundled.py",
    "tests/engine/test_failures.py",
    "tests/engine/verification",
    "tests/kvpool/test_block_pool_machine.py",
    "tests/end_to_end/test_plugin_server.py",
)


@cache
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in house.modules(*PACKAGES).values()
    }


def of_compiled_modules(module: ast.Module) -> set[str]:
    """The names that it imports from these."""
    return {
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.replace(".", "/") + ".py" in COMPILED
        for alias in node.names
    }


def test_the_compiler_is_the_one_that_checks_types() -> None:
    pins = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").split()
    assert SETUP["COMPILER"] in pins


def test_what_inherits_from_compiled_classes_is_compiled() -> None:
    assert modules().keys() >= COMPILED
    wrong = []
    for path, module in modules().items():
        names = set() if path in COMPILED else of_compiled_modules(module)
        classes = (node for node in ast.walk(module) if names and isinstance(node, ast.ClassDef))
        for each in classes:
            bases = names & {ast.unparse(base) for base in each.bases}
            wrong += [f"{path}: {each.name}({base})" for base in bases]
    assert wrong == []


def test_no_kernel_is_given_an_address_by_compiled_code_nor_read_there() -> None:
    """A kernel would read an address after what was there is gone; numba compiles what it can read."""
    names = {"njit", "callee", "Kernel", "Loop", "Memory", "address_of", "ctypes", "data_ptr"}
    wrong = {}
    for path in COMPILED:
        nodes = ast.walk(modules()[path])
        if used := names & {getattr(each, "attr", getattr(each, "id", "")) for each in nodes}:
            wrong[path] = used
    assert wrong == {}


@pytest.fixture(scope="module")
def compiled_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, whose step is compiled in place."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which(os.environ.get("CC", "cc")) is None or not header.exists():
        pytest.skip("there is no C compiler, or nothing of Python's for it")
    tree = tmp_path_factory.mktemp("compiled")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "tests", "bench", "training", "scripts", "examples", "deploy"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | {"COMPILE_SLIPSTREAM": "1", "CFLAGS": "-O1"},
        check=True,
        capture_output=True,
    )
    return tree


@pytest.mark.slow
def test_the_compiled_step_passes_the_same_suites(compiled_tree: Path) -> None:
    run = [sys.executable, "-P", "-c", "import engine.core as c; print(c.__file__)"]
    env = os.environ | {"PYTHONPATH": str(compiled_tree)}
    where = subprocess.run(
        run, cwd=compiled_tree, env=env, check=True, capture_output=True, text=True
    )
    assert where.stdout.strip().endswith(".so"), where.stdout
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *_SUITES],
        cwd=compiled_tree,
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
