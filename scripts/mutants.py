"""Runs the tests on a copy of the tree with one small fault after another (``scripts/mutants``).

The faults are listed in ``tests/mutants.toml``: each replaces one passage of one function, and names the
test files that should notice it. A fault is *killed* where one of these tests fails, *survived* where
they all pass. Where its passage is not found exactly once in the function, or a test file is gone, it
has to be written anew for the code as it is now: what is wrong, it says in words.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
LEFT_OUT = (
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    ".peers",
    "__pycache__",
    "build",
    "dist",
    "runs",
    "site",
)
# Compiled kernels are kept by the text of all of these; what is compiled of a fault is thrown away.
COMPILED = ("compiled/", "engine/kernels/")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
KILLED, SURVIVED, STALE, TIMED_OUT = "killed", "SURVIVED", "TEXT NOT FOUND", "TIMED OUT"


class StaleError(Exception):
    """A fault does not fit the code any more."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in ``function`` (``Class.method`` for methods) of ``file``, ``old`` becomes ``new``.
    ``part``: which part of the core it is in. ``tests``: the files that should notice."""

    name: str
    part: str
    fault: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


def load(path: Path) -> list[Mutant]:
    """Reads the list of faults. Raises TypeError where an entry lacks a field or has an unknown one."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def mutated(source: str, mutant: Mutant) -> str:
    """Returns the file with the fault. Raises StaleError unless the function has the passage once."""
    start, end = _span(source, mutant.function)
    body = source[start:end]
    if body.count(mutant.old) != 1:
        times = body.count(mutant.old)
        raise StaleError(f"{mutant.file}: the passage is {times} times in {mutant.function}")
    changed = source[:start] + body.replace(mutant.old, mutant.new) + source[end:]
    ast.parse(changed)
    return changed


def _span(source: str, function: str) -> tuple[int, int]:
    """Returns where a function (or a class) begins and ends in the text, its decorators included."""
    scope: list[ast.stmt] = ast.parse(source).body
    found: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for name in function.split("."):
        found = next((each for each in _definitions(scope) if each.name == name), None)
        if found is None:
            raise StaleError(f"there is no {function}")
        scope = found.body
    assert found is not None
    lines = source.splitlines(keepends=True)
    first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    return len("".join(lines[: first - 1])), len("".join(lines[: found.end_lineno]))


def _definitions(
    scope: Iterable[ast.stmt],
) -> Iterable[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for each in scope:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Returns those with these names or of these parts; all, where none is named. Raises SystemExit for a
    name that nothing has."""
    known = {each.name for each in mutants} | {each.part for each in mutants}
    if unknown := sorted({*names} - known):
        raise SystemExit(f"no mutant and no part is named {', '.join(unknown)}")
    return [each for each in mutants if not names or {each.name, each.part} & {*names}]


class Copy:
    """A copy of the tree, in which tests are run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._cache = folder / "cache"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*LEFT_OUT))

    def run(self, tests: Sequence[str], seconds: float, own_cache: bool) -> tuple[int | None, str]:
        """Runs pytest up to the first failure. Returns its exit status, None where it took longer than
        ``seconds``, and what it said."""
        environment = os.environ | SETTINGS
        if own_cache:
            environment["XDG_CACHE_HOME"] = str(self._cache)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--tb=line"]
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # Its children, too: servers that tests have started.
            os.killpg(process.pid, 9)
            process.communicate()
            return None, ""
        finally:
            shutil.rmtree(self._cache, ignore_errors=True)
        return process.returncode, said

    def judge(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """Returns what becomes of a fault, and the first test that notices it."""
        path = self.root / mutant.file
        if missing := [each for each in (mutant.file, *mutant.tests) if not self._has(each)]:
            return STALE, f"{', '.join(missing)} is not there"
        sound = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutated(sound, mutant))
        except StaleError as error:
            return STALE, str(error)
        try:
            status, said = self.run(tests, seconds, mutant.file.startswith(COMPILED))
        finally:
            self._write(path, sound)
        if status is None:
            return TIMED_OUT, f"after {seconds:.0f} s"
        if status == 0:
            return SURVIVED, ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return KILLED, found[1] if found else f"pytest ended with {status}"

    def _has(self, name: str) -> bool:
        return (self.root / name).exists()

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # A file of the same length that is written within the same second would pass for the one before.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults, or of parts of the core; all if none")
    parser.add_argument("--list", action="store_true", help="name them and run nothing")
    parser.add_argument("--trust", action="store_true", help="do not run tests without a fault")
    parser.add_argument("--all-fast", action="store_true", help="run all fast tests for each")
    parser.add_argument("--seconds", type=float, default=900.0, help="of tests for each, at most")
    return parser.parse_args()


def check_sound(copy: Copy, mutants: Sequence[Mutant], seconds: float) -> None:
    """Raises SystemExit where tests fail without any fault: they would seem to notice every one."""
    files = sorted({name for each in mutants for name in each.tests if copy._has(name)})
    status, said = copy.run(files, seconds * 10, False)
    if status != 0:
        raise SystemExit(f"the tests fail without a fault:\n{said[-2000:]}")


def main() -> int:
    asked = arguments()
    mutants = chosen(load(MUTANTS), asked.names)
    if asked.list:
        for each in mutants:
            print(f"{each.part:13} {each.name:36} {each.fault}")
        return 0
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        if not asked.trust:
            check_sound(copy, mutants, asked.seconds)
        for each in mutants:
            tests = ["-m", "not slow and not real"] if asked.all_fast else [*each.tests]
            began = time.monotonic()
            verdict, detail = copy.judge(each, tests, asked.seconds)
            verdicts[verdict] += 1
            took = time.monotonic() - began
            print(f"{verdict:14} {each.name:36} {took:4.0f} s  {detail}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return int(verdicts.total() != verdicts[KILLED])


if __name__ == "__main__":
    sys.exit(main())
