"""The comparison on fake peers, whose workers and server are real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contenders import ContenderFailedError, Job, Run
from bench.peers.__main__ import ALL_PEERS, main
from bench.peers.http_worker import DIALECTS, UNKNOWN
from bench.peers.options import SAMPLINGS, parse_options
from bench.peers.place import Arm, Peer, PeerUnavailableError, Place, call, once
from bench.peers.protocol import Ask, Reply
from bench.peers.report import CellFigures, Figures, cell_figures, gains_markdown
from bench.peers.worker import PeerContender, Worker, to_run
from bench.runner import Cell, Measured
from worlds.fake_peer import FakePeer, FakeServedPeer, UnavailablePeer, text_of
from worlds.served_command import until
from worlds.tiny_bench_model import save_tiny_model

ASK = Ask(prompts=[[1, 2], [30]], num_new_tokens=4, temperature=0.0, seed=0)
JOB = Job(((1, 2), (30,)), 4, SAMPLINGS["greedy"], seed=0)
RIVALS: list[Peer] = [
    FakePeer("steady", {"steady one": {}, "steady two": {"at_a_time": 2}}),
    FakePeer("broken", {"broken always": {"fails": True}, "broken short": {"missing": 1}}),
    FakePeer("mortal", {"mortal": {"dies": True}}),
    FakePeer("unwilling", {"unwilling": {}}, refuses="no such weights"),
    UnavailablePeer(),
    FakeServedPeer(),
]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, tmp_path, tmp_path, num_threads=1, max_running=2, max_tokens=64)


@contextmanager
def started(peer: Peer, place: Place, run_seconds: float = 600.0) -> Iterator[Worker]:
    (plan,) = peer.plans(place)
    worker = Worker(plan, place.cache / "logs" / "worker.log", run_seconds)
    try:
        yield worker
    finally:
        worker.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run over all peers, and its Markdown under ``markdown``."""
    stem = tmp_path_factory.mktemp("out") / "peers"
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    arguments = ["--model", str(folder), "--draft-model", str(folder), "--output", str(stem)]
    arguments += ["--cache", str(tmp_path_factory.mktemp("cache")), "--workload", "random"]
    arguments += ["--reference", "steady one", "--rounds", "2", "--new-tokens", "6"]
    arguments += ["--concurrency", "1", "2", "--sampling", "greedy"]
    previous = signal.getsignal(signal.SIGTERM)
    assert main(arguments, RIVALS) == 0
    assert signal.getsignal(signal.SIGTERM) is previous
    assert stem.with_name("peers.png").read_bytes().startswith(b"\x89PNG")
    document: dict[str, Any] = json.loads(stem.with_name("peers.json").read_text(encoding="utf-8"))
    return document | {"markdown": stem.with_name("peers.md").read_text(encoding="utf-8")}


def test_every_arm_that_works_is_measured_in_every_cell_against_the_reference(
    written: dict[str, Any],
) -> None:
    keys = [(cell["workload"], cell["batch_size"]) for cell in written["cells"]]
    assert keys == [("random", 1), ("random", 2)]
    for cell in written["cells"]:
        arms = {arm["name"]: arm for arm in cell["arms"]}
        assert list(arms) == ["steady one", "steady two", "served plain (HTTP)"]
        assert cell["num_rounds"] == written["settings"]["num_rounds"] == 2
        base = arms["steady one"]
        assert base["ratio"] == base["prompt_ratio"] == base["decode_ratio"] == 1.0
        for arm in arms.values():
            ratio = arm["tokens_per_second"] / base["tokens_per_second"]
            assert arm["ratio"] == pytest.approx(ratio)
            low, high = arm["round_ratios"]
            assert low <= high
            assert arm["equal_prefix"] == 1.0
        assert arms["steady two"]["speculates"]
        assert arms["served plain (HTTP)"]["over_http"]
    assert written["machine"]["num_threads"] == written["settings"]["num_threads"]
    assert written["settings"]["command"].startswith("python -m bench.peers --model ")
    assert written["workers"]["steady"] == {"fake": "1.0"}
    assert "worlds.fake_peer" in written["workers"]["served"]["command"]


def test_who_fails_is_named_with_the_reason_and_takes_nothing_from_others(
    written: dict[str, Any],
) -> None:
    assert written["unavailable"] == {
        "unwilling": "ValueError: no such weights",
        "absent": "no wheel for this machine",
    }
    for cell in written["cells"]:
        failed = cell["failed"]
        assert len(failed) == 4
        assert failed["broken always"] == "RuntimeError: no such kernel"
        assert "got [3" in failed["broken short"]
        assert "the worker ended" in failed["mortal"]
        assert "HTTP 400" in failed["served refused (HTTP)"]
    assert "segmentation fault" in written["cells"][0]["failed"]["mortal"]
    for reason in ("no such kernel", "no wheel for this machine", "no such weights"):
        assert reason in written["markdown"]


def test_a_worker_stands_still_except_while_asked(place: Place) -> None:
    with started(RIVALS[0], place) as worker:
        worker.load()
        pid = worker.pid
        until(lambda: process_state(pid) == "T")
        replies = worker.run(ASK)
        until(lambda: process_state(pid) == "T")
    assert [reply.token_ids for reply in replies] == [text_of([2], 4), text_of([30], 4)]
    assert not Path(f"/proc/{pid}").exists()


def process_state(pid: int) -> str:
    """T: it stands still; Z: it has ended."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return stat.rpartition(")")[2].split()[0]


def test_a_server_ends_with_its_worker(place: Place) -> None:
    with started(FakeServedPeer(), place) as worker:
        worker.load()
        group = worker.pid
        assert len(members(group)) == 2
        assert [reply.token_ids for reply in worker.run(ASK)] == [text_of([2], 4), text_of([30], 4)]
    until(lambda: members(group) == [])


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(pid) == group and process_state(pid) != "Z":
                found.append(pid)
    return found


def test_a_server_that_does_not_start_says_why(place: Place) -> None:
    told = "status 1: (?s:.*)ValueError: invalid literal"
    peer = FakeServedPeer("unlucky", "no port")
    with started(peer, place) as worker, pytest.raises(ContenderFailedError, match=told):
        worker.load()


def test_a_worker_that_never_answers_has_failed(place: Place) -> None:
    peer = FakePeer("slow", {"slow": {"hangs": True}})
    with started(peer, place, run_seconds=0.2) as worker:
        worker.load()
        (arm,) = worker.plan.arms
        for told in ("no answer in time", "ended"):
            with pytest.raises(ContenderFailedError, match=told):
                PeerContender(worker, arm).run(JOB)


def test_decoding_begins_when_every_request_has_a_token() -> None:
    late = Reply([7, 8, 9, 10], [(2.0, 1), (5.0, 4)])
    early = Reply([1, 2, 3, 4], [(1.0, 1), (1.5, 2), (3.0, 4)])
    run = to_run([early, late], JOB)
    assert (run.seconds, run.decode_seconds) == (5.0, 3.0)
    assert run.num_decode_tokens == 8 - 2 - 1
    assert run.output_token_ids == ((1, 2, 3, 4), (7, 8, 9, 10))


def test_a_steady_job_is_timed_while_as_many_run_as_ever() -> None:
    job = replace(JOB, prompts=((1,), (2,), (3,)), num_running=2)
    assert job.lengths == (2, 4, 4)
    short = Reply([7, 8], [(1.0, 1), (2.0, 2)])
    long = Reply([1, 2, 3, 4], [(1.5, 1), (1.75, 3), (4.0, 4)])
    last = Reply([5, 6, 7, 8], [(3.0, 1), (6.0, 4)], sent=2.5)
    run = to_run([short, long, last], job)
    # From the second one's first token until the third is sent: one of the first, two of the second.
    assert (run.seconds, run.decode_seconds, run.num_decode_tokens) == (6.0, 1.0, 3)
    with pytest.raises(ContenderFailedError, match="got"):
        to_run([long, short, last], job)


def test_what_replies_tell_of_their_drafts_is_one_account() -> None:
    told = {"num_steps": 2, "num_draft_tokens": 6, "num_accepted_tokens": 2}
    early = Reply([1, 2, 3, 4], [(1.0, 4)], account={**told, "estimated_speedup": 2.0})
    late = Reply([1, 2, 3, 4], [(3.0, 4)], account={**told, "estimated_speedup": None})
    run = to_run([early, late], JOB)
    assert run.account is not None
    assert run.num_request_steps == run.account.num_request_steps == 4
    assert (run.account.num_draft_tokens, run.account.num_accepted_tokens) == (12, 4)
    # Each one's speed-up holds for the seconds that it took; no word of it is none.
    assert (run.account.reply_baseline_seconds, run.account.reply_step_seconds) == (5.0, 4.0)
    assert to_run([early, replace(late, account=None)], JOB).account is None


def test_a_served_peer_keeps_so_many_running_and_gives_each_its_length(place: Place) -> None:
    ask = replace(ASK, prompts=[[1], [2], [3]], num_running=1, lengths=[2, 4, 4], laps=[0, 0, 1])
    with started(FakeServedPeer(), place) as worker:
        worker.load()
        replies = worker.run(ask)
    wanted = [text_of([1], 2), text_of([2], 4), text_of([3], 4)]
    assert [reply.token_ids for reply in replies] == wanted
    for before, after in zip(replies, replies[1:], strict=False):
        assert after.sent >= before.arrivals[-1][0]


REAL_PEERS = {peer.name: peer for peer in ALL_PEERS}


def arms(name: str, place: Place) -> set[str]:
    return {arm.name for plan in REAL_PEERS[name].plans(place) for arm in plan.arms}


@pytest.mark.parametrize("name", REAL_PEERS)
def test_without_a_draft_model_nobody_drafts_with_one(place: Place, name: str) -> None:
    bare = replace(place, draft=None)
    drafting = {each for each in arms(name, place) if re.search("draft|small|assist", each)}
    assert arms(name, bare) == arms(name, place) - drafting
    assert "'None'" not in repr([plan.load for plan in REAL_PEERS[name].plans(bare)])


def test_trained_heads_are_arms_of_this_server_alone(place: Place) -> None:
    given = replace(place, heads={"tuned": place.target / "head"})
    more = arms("slipstream", given) - arms("slipstream", place)
    ways = [(weights, way) for weights in ("bf16", "int8") for way in ("", " (HTTP)")]
    assert more == {f"slipstream {weights} tuned{way}" for weights, way in ways}
    for plan in REAL_PEERS["slipstream"].plans(given):
        assert f"tuned={place.target / 'head'}" in repr(plan.load)
    for name in REAL_PEERS.keys() - {"slipstream"}:
        assert arms(name, given) == arms(name, place)


@pytest.mark.parametrize("name", ["openvino", "llama.cpp"])
def test_what_is_exported_of_one_model_is_not_taken_for_another(place: Place, name: str) -> None:
    def models(place: Place) -> set[str]:
        text = repr([plan.load for plan in REAL_PEERS[name].plans(place)])
        return set(re.findall(r"[^']*/model-[^']*", text))

    one, other = (replace(place, target=place.target / each / "model") for each in ("a", "b"))
    assert models(one)
    assert models(one).isdisjoint(models(other))


def test_on_a_file_llama_and_this_server_are_given_the_file_and_openvino_what_it_means(
    place: Place,
) -> None:
    file = place.target / "some.gguf"
    given = replace(place, gguf=file, draft=None)

    def loaded(name: str, pattern: str) -> dict[str, str]:
        return {
            arm.name: repr(plan.load)
            for plan in REAL_PEERS[name].plans(given)
            for arm in plan.arms
            if re.search(pattern, arm.name)
        }

    llama = loaded("llama.cpp", "")
    assert {"llama.cpp gguf plain (HTTP)", "llama.cpp gguf lookup (HTTP)"} <= set(llama)
    for told in (*llama.values(), *loaded("slipstream", "gguf").values()):
        assert str(file) in told
    exports = loaded("openvino", "int4")
    assert exports
    for told in exports.values():
        assert str(given.export("openvino", given.target, "int4-g128")) in told


def test_settings_of_this_server_make_arms_beside_those_without_them(place: Place) -> None:
    given = replace(place, gguf=place.target / "some.gguf", settings={"quantize_head": False})
    loads = {plan.name: plan.load for plan in REAL_PEERS["slipstream"].plans(given)}
    assert "quantize_head" not in loads["slipstream gguf"]
    assert loads["slipstream gguf quantize_head=False"]["quantize_head"] is False
    served = loads["slipstream gguf quantize_head=False (HTTP)"]["command"]
    assert "--no-quantize-head" in served


def test_settings_are_read_as_json_or_words() -> None:
    arguments = ["--engine", "quantize_head=false", "kv_cache_dtype=fp8", "num_blocks=64"]
    options = parse_options(arguments, ["slipstream"], "")
    assert options.engine == {"quantize_head": False, "kv_cache_dtype": "fp8", "num_blocks": 64}
    with pytest.raises(SystemExit):
        parse_options(["--engine", "quantize_head"], ["slipstream"], "")


def test_tokens_that_a_stream_leaves_out_are_counted_at_its_end() -> None:
    tokens = DIALECTS["llama"].tokens
    assert tokens({"tokens": [7, 8], "stop": False}, 3) == [7, 8]
    assert tokens({"tokens": [], "stop": True, "tokens_predicted": 7}, 5) == [UNKNOWN] * 2
    assert tokens({"tokens": [], "stop": True, "tokens_predicted": 5}, 5) == []


def test_half_a_folder_is_never_taken_for_a_whole(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise PeerUnavailableError("no disk")

    with pytest.raises(PeerUnavailableError):
        once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    once(tmp_path / "model", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]
    once(tmp_path / "model", fail)


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(PeerUnavailableError, match="not today"):
        call(["sh", "-c", "echo not today >&2; exit 1"])
    with pytest.raises(PeerUnavailableError, match="no-such-program"):
        call(["no-such-program"])


def test_patterns_choose_arms_and_unwanted_workers_are_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    arguments = ["--quick", "--model", str(folder), "--cache", str(tmp_path / "cache")]
    arguments += ["--workload", "random", "--concurrency", "1", "--only", "*two"]
    assert main(arguments, RIVALS[:4]) == 0
    printed = capsys.readouterr().out
    assert "steady two" in printed
    assert "steady one" not in printed.replace("against steady one", "")
    assert "unwilling: loading" not in printed


def figures_of(name: str, rate: float, decoding: float) -> Figures:
    way = ("plain" not in name, "HTTP" in name)
    return Figures(name, *way, rate, 100.0, 1.0, decoding, *[None] * 7)


def test_gains_are_against_the_plain_arm_of_the_same_peer_weights_and_way() -> None:
    rates = {"us gguf plain": (10.0, 20.0), "us gguf plain (HTTP)": (5.0, 20.0)}
    rates |= {"us gguf auto": (15.0, 40.0), "us int8 auto": (15.0, 40.0)}
    rates |= {"us gguf auto (HTTP)": (6.0, 22.0), "them lookup 4": (9.0, 9.0)}
    arms = [figures_of(name, *each) for name, each in rates.items()]
    cell = Cell("mt_bench", 1, SAMPLINGS["greedy"])
    lines = gains_markdown([CellFigures(cell, 1, 9.0, 4, 1, arms, {})]).splitlines()
    assert "mt_bench 1 greedy" in lines[0]
    gains = {row[1].strip(): row[2].strip() for row in (line.split("|") for line in lines[2:])}
    assert gains == {
        "us gguf auto": "1.50x (2.00x)",
        "us int8 auto": "-",
        "us gguf auto (HTTP)": "1.20x (1.10x)",
        "them lookup 4": "-",
    }


def test_prompts_of_second_turns_are_counted() -> None:
    """They hold the first turn and its answer, to where the model ended it, and are read in the time that
    is called the prompts'."""
    job = replace(JOB, prompts=((1, 2, 3),), follow_ups=((9, 4),))
    run = Run(((7, 9, 8, 8), (5, 5, 5, 5)), 3.0, 2.0, 6, 8)
    measured = Measured(Cell("mt_bench", 1, JOB.sampling), (job,), {"us": [[run]]})
    cell = cell_figures(measured, {"us": Arm("us")}, "us")
    assert (cell.num_prompts, cell.mean_prompt_tokens) == (2, (3 + 6) / 2)
    (arm,) = cell.arms
    assert (arm.prompt_tokens_per_second, arm.first_token_seconds) == (9.0, 0.5)


def test_a_file_of_questions_brings_its_workloads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["Why?"]}\n', encoding="utf-8")
    arguments = ["--prompts", str(file), "--ids", "odd", "--workload", "qa", "code"]
    options = parse_options(arguments, ["us"], "")
    assert options.workloads == ("qa", "code")
    told = {"file": "questions.jsonl", "ids": "odd", "per_category": None}
    assert options.to_json()["questions"] == told
    assert parse_options(["--prompts", "3"], ["us"], "").num_prompts == 3
    for wrong in (["--workload", "qa"], ["--prompts", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            parse_options(wrong, ["us"], "")
    assert "'qa' is none of code" in capsys.readouterr().err
