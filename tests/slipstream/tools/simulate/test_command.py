"""``python -m slipstream.tools.simulate``: figures where they are asked for, and refusals in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from slipstream.tools.simulate.command import main
from slipstream.tools.simulate.policies import speculative_of
from slipstream.tools.simulate.profile import Costs, Kind, Profile, write_profile
from worlds.commands import Run

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys, main)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    kinds = {"edit": Kind(((40, 10),), acceptance=(0.8,))}
    costs = Costs(((1, 0, 0.1, 1), (33, 0, 0.15, 1)))
    engine = EngineConfig(num_blocks=256, max_num_seqs=8, max_num_waiting=16)
    write_profile(Profile(costs, kinds, engine), path)
    return path


def test_a_run_tells_all_that_its_lists_combine_to(profile: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.json"
    flags = ["--rate=1", "--seconds=4", "--replicas=1,2", "--policy=none,fixed:2", f"--json={out}"]
    said = run("run", profile, *flags).out
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(each["run"], each["num_replicas"]) for each in found] == [
        ("none, least_loaded", 1),
        ("fixed:2, least_loaded", 1),
        ("none, least_loaded", 2),
        ("fixed:2, least_loaded", 2),
    ]
    assert said.count("fixed:2, least_loaded") == 2
    assert found[1]["tokens_per_step"] > found[0]["tokens_per_step"] == 1.0


def test_a_trace_of_texts_is_drafted_for_by_a_real_drafter(
    profile: Path, tmp_path: Path, run: Run
) -> None:
    text = [5, 6, 7, 8] * 10
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"at": 0, "prompt": text, "completion": text}), encoding="utf-8")
    out = tmp_path / "out.json"
    flags = [f"--trace={trace}", "--drafter=ngram", "--policy=fixed:4", f"--json={out}"]
    run("run", profile, *flags)
    (found,) = json.loads(out.read_text(encoding="utf-8"))
    assert found["tokens_per_step"] == pytest.approx(5.0)


def test_a_study_writes_its_picture_and_its_figures(
    profile: Path, tmp_path: Path, run: Run
) -> None:
    flags = ["--only=scale", "--most-replicas=1", "--seconds=3", f"--out={tmp_path}"]
    assert "round_robin" in run("study", profile, *flags).out
    assert (tmp_path / "scale.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert len(json.loads((tmp_path / "scale.json").read_text(encoding="utf-8"))) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate=1", "--trace=x"], "either --rate or --trace"),
        ([], "either --rate or --trace"),
        (["--rate=-1"], "rate"),
        (["--rate=1", "--drafter=ngram"], "--drafter needs the texts"),
        (["--rate=1", "--policy=often"], "policy 'often'"),
        (["--rate=1", "--policy=fixed:0"], "policy 'fixed:0'"),
        (["--rate=1", "--routing=random"], "routing 'random'"),
        (["--rate=1", "--per-machine=0"], "replicas per machine"),
        (["--trace=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(
    profile: Path, flags: list[str], words: str, run: Run
) -> None:
    assert words in run("run", profile, *flags, status=2).err


def test_a_kind_has_one_file_of_prompts(run: Run) -> None:
    flags = ["--prompts", "edit=a.jsonl", "--prompts", "edit=b.jsonl"]
    refused = run("measure", 1, "profile.json", *flags, status=2)
    assert "--prompts: a kind has two files" in refused.err


def test_the_words_of_policies() -> None:
    assert speculative_of("none").draft_strategy == "none"
    for policy in ("fixed", "goodput"):
        found = speculative_of(f"{policy}:4")
        assert (found.draft_strategy, found.adaptive_depth) == ("measured", policy)
        assert found.num_speculative_tokens == found.max_speculative_tokens == 4
    with pytest.raises(ValueError, match="none:2"):
        speculative_of("none:2")


def test_the_extra_is_named_where_it_is_missing() -> None:
    code = (
        "import sys, runpy; sys.modules['simpy'] = None; "
        "runpy.run_module('slipstream.tools.simulate', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert ".[simulate]" in done.stderr
