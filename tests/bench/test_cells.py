"""Cells: what is kept and gone on with, the figures made of it, and the whole command on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.cells import contenders
from bench.cells.__main__ import main
from bench.cells.contenders import http_plan, in_process, ways_of
from bench.cells.figures import (
    AUTO,
    BEST,
    HTTP,
    PLAIN,
    CellFigures,
    best_other,
    drafters_of,
    geometric_mean,
    ratios_to_plain,
)
from bench.cells.groups import groups_of
from bench.cells.options import SAMPLINGS, parse_options
from bench.cells.picture import draw_all
from bench.cells.plan import CellPlan, Pace, make_plans, measure_pace, missing_rounds
from bench.cells.records import CellKey, Results, RoundRecord, RunRecord, record_run
from bench.cells.report import different_texts, report
from bench.contenders import Account, EngineContender, Job, Run, SteppedContender, parse_drafter
from bench.runner import Cell, make_jobs
from bench.workloads import Prompt, PromptSource
from engine.core import EngineCore
from engine.names import BUNDLED
from engine.request.params import PLAIN as PLAIN_DECODING
from worlds.scripted_engine import engine_info
from worlds.tiny_bench_model import save_tiny_model, tiny_tokenizer

KEY = CellKey(
    model="some",
    weights="own",
    steady=False,
    workload="chat",
    sampling="greedy",
    at_once=1,
    num_prompts=2,
    num_new_tokens=8,
    default="ngram",
    contenders=(PLAIN, "ngram", AUTO, "suffix"),
)


def run_of(seconds: float, text: str = "same", estimate: float = 1.0) -> RunRecord:
    counts = {"tokens": 8, "steps": 4, "written": 8, "drafted": 10, "accepted": 4}
    told = {"estimate": estimate, "step_estimate": None, "texts": (text,)}
    return RunRecord(seconds=seconds, **counts, **told)


def rounds_of(
    seconds: Mapping[str, Sequence[Sequence[float]]], key: CellKey = KEY
) -> list[RoundRecord]:
    """``seconds[contender][round][job]``."""
    key = replace(key, contenders=tuple(seconds))
    found = []
    for number in range(len(next(iter(seconds.values())))):
        runs = {name: tuple(map(run_of, each[number])) for name, each in seconds.items()}
        found.append(RoundRecord(key, number, 20.0, runs))
    return found


def figures_of(seconds: Mapping[str, Sequence[Sequence[float]]]) -> CellFigures:
    rounds = rounds_of(seconds)
    return CellFigures(rounds[0].cell, rounds)


# --- what is kept ---


def test_a_later_call_goes_on_where_an_interrupted_one_was(tmp_path: Path) -> None:
    path = tmp_path / "some" / "cells.jsonl"
    first, second = rounds_of({PLAIN: [[1.0], [2.0]], "ngram": [[0.5], [0.75]]})
    results = Results(path)
    results.start({"model": "of some kind"})
    results.add(first)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"kind": "round", "sch')
    again = Results(path)
    assert again.rounds == [first]
    assert again.has(first.cell, 0)
    assert not again.has(first.cell, 1)
    assert not again.has(replace(first.cell, num_new_tokens=16), 0)
    again.add(second)
    last = Results(path)
    assert last.rounds == [first, second]
    assert last.starts[0]["model"] == "of some kind"


@pytest.mark.parametrize("text", ["# not JSON\n", '{"schema": 99}\n', '{"kind": "start"}\n'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no results of bench.cells"):
        Results(path)
    assert path.read_text(encoding="utf-8") == text
    with pytest.raises(SystemExit, match="holds no results"):
        main(["--report", "--output", str(path)])


def test_of_a_steady_run_the_full_batch_is_kept_and_of_others_all() -> None:
    account = Account(
        num_request_steps=3,
        num_draft_tokens=9,
        num_accepted_tokens=2,
        baseline_seconds=6.0,
        step_seconds=4.0,
        decode_baseline_seconds=5.0,
        decode_step_seconds=2.0,
        reply_baseline_seconds=3.0,
        reply_step_seconds=2.0,
    )
    run = Run(((1, 2), (3, 4, 5)), 4.0, 2.5, 3, 3, account)
    whole, full = record_run(run, steady=False), record_run(run, steady=True)
    assert (whole.seconds, whole.tokens, whole.step_estimate) == (4.0, 5, 1.5)
    assert (full.seconds, full.tokens, full.step_estimate) == (2.5, 3, 2.5)
    assert (whole.written, whole.estimate, whole.drafted) == (5, 1.5, 9)
    assert whole.texts == full.texts
    assert len(set(whole.texts)) == 2
    other = record_run(replace(run, output_token_ids=((1, 2), (3, 4, 6))), steady=False)
    assert other.texts[0] == whole.texts[0]
    assert other.texts[1] != whole.texts[1]
    in_one_piece = replace(run, decode_seconds=0.0, num_decode_tokens=0)
    assert record_run(in_one_piece, steady=True) == record_run(in_one_piece, steady=False)
    assert record_run(replace(run, account=Account()), steady=False).estimate is None
    with pytest.raises(ValueError, match="account"):
        record_run(replace(run, account=None), steady=False)


# --- figures ---


def test_a_ratio_pairs_runs_that_stood_next_to_each_other() -> None:
    """The machine is three times as slow in the second round, for both alike: only the pairs tell."""
    figures = figures_of({PLAIN: [[1.0], [3.0], [1.0]], "ngram": [[0.5], [1.5], [0.5]]})
    ratio = figures.ratio("ngram", PLAIN)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert figures.speed("ngram") == pytest.approx(16.0)


def test_a_ratio_over_jobs_is_that_of_the_total_times() -> None:
    figures = figures_of({PLAIN: [[1.0, 9.0]] * 3, "ngram": [[1.0, 4.0]] * 3})
    ratio = figures.ratio("ngram", PLAIN)
    assert ratio.value == pytest.approx(10.0 / 5.0)
    # One of the two prompts alone is in a quarter of all draws each.
    assert (ratio.low, ratio.high) == pytest.approx((1.0, 9.0 / 4.0))


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """300 cells of 12 jobs and 5 rounds with noise on every run: of 95 % intervals of the gain that
    is put in, nearly as many hold it as their name says."""
    random = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        noise = np.exp(random.normal(0.0, 0.05, size=(2, 5, 12)))
        seconds = {PLAIN: noise[0].tolist(), "ngram": (noise[1] / 1.3).tolist()}
        ratio = figures_of(seconds).ratio("ngram", PLAIN)
        assert ratio.low < ratio.value < ratio.high
        held += ratio.low <= 1.3 <= ratio.high
    assert 0.88 < held / 300 <= 1.0


def test_geometric_means_multiply_and_narrow() -> None:
    noisy = {PLAIN: [[1.0], [1.1], [0.9]], "ngram": [[0.5], [0.5], [0.5]]}
    ratio = figures_of(noisy).ratio("ngram", PLAIN)
    slower = figures_of({PLAIN: [[1.0]] * 3, "ngram": [[2.0]] * 3}).ratio("ngram", PLAIN)
    mean = geometric_mean([ratio, slower])
    assert mean.value == pytest.approx(1.0)
    assert (mean.low, mean.high) == pytest.approx((np.sqrt(0.9), np.sqrt(1.1)))


def test_the_best_other_is_the_fastest_that_is_neither_plain_nor_auto() -> None:
    seconds = {PLAIN: [[1.0]], "ngram": [[0.9]], AUTO: [[0.4]], "suffix": [[0.5]]}
    over_http = {name + HTTP: each for name, each in seconds.items()}
    over_http["ngram" + HTTP] = [[0.3]]
    figures = figures_of(seconds | over_http)
    assert best_other(figures, "") == "suffix"
    assert best_other(figures, HTTP) == "ngram" + HTTP
    assert best_other(figures_of({PLAIN: [[1.0]], AUTO: [[0.5]]}), "") is None
    (best,) = ratios_to_plain([figures], BEST, HTTP)
    assert best.value == pytest.approx(1 / 0.3)
    assert ratios_to_plain([figures], "oracle", "") == []
    assert drafters_of([figures], HTTP) == ["ngram", AUTO, "suffix"]


def test_estimates_are_weighed_by_time_and_texts_compared_with_plain() -> None:
    first, second = rounds_of({PLAIN: [[1.0, 1.0]] * 2, AUTO: [[1.0, 3.0]] * 2})
    told = (run_of(1.0, estimate=2.0), run_of(3.0, "other", estimate=1.0))
    second = replace(second, runs={**second.runs, AUTO: told})
    first = replace(first, runs={**first.runs, AUTO: (told[0], replace(told[1], texts=("same",)))})
    figures = CellFigures(first.cell, [first, second])
    # Plain would have taken 2 and 3 seconds of what took 1 and 3.
    assert figures.estimate(AUTO, lambda run: run.estimate) == pytest.approx(5 / 4)
    assert figures.estimate(AUTO, lambda run: run.step_estimate) is None
    assert figures.same_text(AUTO, PLAIN) == 0.75
    assert (figures.tokens_per_step(AUTO), figures.acceptance(AUTO)) == (2.0, 0.4)
    assert different_texts([first]) == []
    (line,) = different_texts([first, second])
    assert "chat, greedy, 1 at once, closed: auto wrote plain's text in 75.0%" in line


def test_who_failed_in_some_round_is_named_and_has_no_figures() -> None:
    first, second = rounds_of({PLAIN: [[1.0], [1.0]], AUTO: [[0.5], [0.5]]})
    second = replace(second, runs={PLAIN: second.runs[PLAIN]}, failed={AUTO: "the worker ended"})
    assert CellFigures(first.cell, [first, second]).names == [PLAIN]
    assert "- auto: the worker ended" in report([first, second])


# --- tables and pictures ---


def test_the_report_says_what_was_asked(tmp_path: Path) -> None:
    loses = rounds_of({PLAIN: [[1.0]] * 3, "ngram": [[1.25]] * 3, AUTO: [[0.8]] * 3})
    at_8 = replace(KEY, at_once=8)
    seconds = {PLAIN: [[1.0]] * 3, "ngram": [[0.5]] * 3, AUTO: [[0.4]] * 3}
    slower = {name + HTTP: [[each[0][0] * 1.25]] * 3 for name, each in seconds.items()}
    both = rounds_of(seconds | slower, at_8)
    steady = rounds_of(seconds, replace(KEY, steady=True))
    text = report([*loses, *both, *steady])
    assert text.count("## some, its own weights, begun at once\n") == 1
    assert text.count("## some, its own weights, so many all the time\n") == 1
    assert "Intervals wholly under 0.97: in 1 of 2 cells:" in text
    assert "- chat, greedy, 1 at once, closed: ngram 0.80 (0.80-0.80)" in text
    (beside,) = [line for line in text.splitlines() if line.startswith("| plain             |")]
    assert [each.strip() for each in beside.split("|")[2:4]] == ["-", "0.80 (0.80-0.80)"]
    row = next(line for line in text.splitlines() if line.startswith("| chat, greedy, 8 |"))
    told = [each.strip() for each in row.split("|")[3:8]]
    two, more, less = "2.00 (2.00-2.00)", "2.50 (2.50-2.50)", "1.25 (1.25-1.25)"
    assert told == [two, more, "ngram", two, less]
    assert "All contenders wrote the same texts in all runs." in text
    pictures = draw_all(groups_of([*loses, *both, *steady]), tmp_path / "cells.jsonl")
    assert [path.name for path in pictures] == [
        "cells-some-own-closed.png",
        "cells-some-own-closed-http.png",
        "cells-some-own-steady.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


# --- the plan ---


class PacedContender:
    """Takes ``prompt`` seconds for a token of a prompt and ``step`` for a step, by its own clock."""

    name = PLAIN
    max_batch_size = None

    def __init__(self, prompt: float, step: float) -> None:
        self._prompt, self._step = prompt, step

    def run(self, job: Job) -> Run:
        assert job.num_running is None
        read = self._prompt * sum(map(len, job.prompts))
        return Run((), read + self._step * job.num_new_tokens, 0.0, 0, 0)


def test_the_time_is_predicted_from_a_few_short_runs() -> None:
    cell = Cell("chat", 2, SAMPLINGS["greedy"])
    prompts = [Prompt((1,) * count) for count in (10, 20, 30, 40)]
    key = replace(KEY, at_once=2, num_prompts=4, num_new_tokens=50)
    plan = CellPlan(key, cell, make_jobs(cell, prompts, 50))
    steady = CellPlan(replace(key, steady=True), cell, make_jobs(cell, prompts, 50, steady=True))
    pace = measure_pace([plan, steady], PacedContender(0.25, 2.0))
    assert pace == Pace(pytest.approx(0.25), {2: pytest.approx(2.0)})
    contenders = len(key.contenders)
    assert pace.round_seconds(plan) == pytest.approx(contenders * (100 * 0.25 + 2 * 50 * 2.0))
    # Two of the four are cut short: 25 and 50 tokens, then 50 each, two at a time.
    decoding = (25 + 50 + 50 + 50) / 2 * 2.0
    assert pace.round_seconds(steady) == pytest.approx(contenders * (100 * 0.25 + decoding))


def test_plans_are_full_batches_and_steady_ones_two(tmp_path: Path) -> None:
    options = parse_options(["--output", str(tmp_path / "cells.jsonl")], "")
    source = PromptSource(tiny_tokenizer(), 512, 4000)
    plans = make_plans(options, source, [PacedContender(1.0, 1.0)])
    keys = [plan.key for plan in plans]
    assert len(set(keys)) == 5 * 3 * 4 * 2
    counts = {(key.at_once, key.steady): key.num_prompts for key in keys}
    once = {(1, False): 4, (8, False): 8, (16, False): 16, (32, False): 32}
    assert counts == once | {(1, True): 4, (8, True): 16, (16, True): 32, (32, True): 64}
    assert {key.contenders for key in keys} == {(PLAIN,)}
    results = Results(options.output)
    results.add(RoundRecord(keys[0], 1, 20.0, {}))
    assert missing_rounds(plans[0], results, 3) == [0, 2]
    assert missing_rounds(plans[1], results, 2) == [0, 1]


def test_over_http_clients_say_what_is_not_the_default_and_nothing_of_the_default() -> None:
    known = ["auto", "suffix"]
    ways = {PLAIN: PLAIN_DECODING}
    ways |= dict(parse_drafter(text, known) for text in ("auto", "suffix:4", "suffix+max_depth=3"))
    arguments = ["--model", "bundled", "--quantization", "none"]
    usual = http_plan(parse_options(arguments, ""), ways)
    assert [arm.name for arm in usual.arms] == ["plain (HTTP)", "auto (HTTP)"]
    plan = http_plan(parse_options([*arguments, "--drafters", *known], ""), ways)
    suffix = {"draft_strategy": "suffix"}
    fixed = suffix | {"num_speculative_tokens": 4, "adaptive_depth": "fixed"}
    assert {arm.name: arm.options["body"] for arm in plan.arms} == {
        "plain (HTTP)": {"speculative": {"draft_strategy": "none"}},
        "auto (HTTP)": {},
        "suffix fixed 4 (HTTP)": {"speculative": fixed},
        "suffix max_depth=3 (HTTP)": {"speculative": suffix | {"options": {"max_depth": 3}}},
    }
    command = " ".join(plan.load["command"])
    for part in ("serve bundled", "--quantization none", "--device cpu"):
        assert part in command
    assert "--determinism" not in command
    on_gpu = parse_options([*arguments, "--device", "cuda:1", "--determinism", "exact"], "")
    command = " ".join(http_plan(on_gpu, ways).load["command"])
    assert "--device cuda:1 --determinism exact" in command
    assert plan.load["body"]["stream_options"] == {"include_usage": True}
    assert plan.load["salted"] is True


def test_questions_of_other_ids_are_other_cells_and_drafts_are_given_to_the_server(
    tmp_path: Path,
) -> None:
    file = tmp_path / "questions.jsonl"
    lines = (f'{{"question_id": {at}, "category": "qa", "turns": ["Why?"]}}' for at in range(6))
    file.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["--model", "bundled", "--prompts", str(file), "--workload", "qa", "code"]
    arguments += ["--draft", f"second={BUNDLED / 'medusa'}"]
    source = PromptSource(tiny_tokenizer(), 512, 4000)
    keys = []
    for ids in ("odd", "even"):
        options = parse_options([*arguments, "--ids", ids, "--at-once", "1"], "")
        full = replace(source, questions=options.questions)
        plans = make_plans(options, full, [PacedContender(1.0, 1.0)])
        keys += [plan.key for plan in plans]
    assert {key.workload for key in keys} == {"qa (odd ids)", "qa (even ids)", "code"}
    assert {key.num_prompts for key in keys if key.workload != "code"} == {3}
    command = " ".join(http_plan(options, {PLAIN: PLAIN_DECODING}).load["command"])
    assert f"second={BUNDLED / 'medusa'}" in command


@pytest.mark.parametrize(
    ("arguments", "room", "kind"),
    [
        (["--device", "cpu"], 1 << 62, SteppedContender),
        (["--device", "cpu"], 0, EngineContender),
        (["--device", "cuda"], 1 << 62, EngineContender),
        (["--predict"], 1 << 62, EngineContender),
    ],
)
def test_each_has_a_core_of_its_own_where_memory_allows_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], room: int, kind: type[EngineContender]
) -> None:
    loaded: list[object] = []

    def load(_: object) -> SimpleNamespace:
        loaded.append(object())
        return SimpleNamespace(core=loaded[-1])

    monkeypatch.setattr(contenders, "load_core", load)
    monkeypatch.setattr(contenders, "available_bytes", lambda: room)
    ways = {PLAIN: PLAIN_DECODING, "ngram": parse_drafter("ngram", ["ngram"])[1]}
    made = in_process(parse_options(arguments, ""), EngineCore.__new__(EngineCore), ways)
    assert [(type(each), each.name) for each in made] == [(kind, PLAIN), (kind, "ngram")]
    assert len(loaded) == (kind is SteppedContender)


# --- the whole command ---


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that two calls wrote: the first had no time for anything but one round."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    output = tmp_path_factory.mktemp("out") / "cells.jsonl"
    arguments = ["--model", str(folder), "--quick", "--workload", "code", "--sampling", "T1"]
    arguments += ["--at-once", "2", "--load", "closed", "steady", "--way", "in-process", "http"]
    arguments += ["--drafters", "ngram", "suffix", "auto", "--new-tokens", "12", "--rounds", "2"]
    arguments += ["--output", str(output)]
    assert main([*arguments, "--predict"]) == 0
    assert not output.exists()
    assert main([*arguments, "--seconds", "0.001"]) == 0
    assert Results(output).rounds == []
    assert main(arguments) == 0
    return output


@pytest.mark.slow
def test_all_cells_are_measured_once_and_all_texts_are_plains(written: Path) -> None:
    rounds = Results(written).rounds
    found = [(each.cell.steady, each.number) for each in rounds]
    assert found == [(False, 0), (False, 1), (True, 0), (True, 1)]
    names = [PLAIN, "ngram", "suffix", AUTO]
    for each in rounds:
        assert each.failed == {}
        assert list(each.runs) == [*names, *(name + HTTP for name in names)]
        for name, runs in each.runs.items():
            for run in runs:
                assert run.seconds > 0
                assert run.tokens > 0
                assert (run.step_estimate is None) == name.endswith(HTTP)
                assert (run.drafted == 0) == (name.removesuffix(HTTP) == PLAIN) or run.drafted == 0
                assert run.written >= run.tokens
    assert different_texts(rounds) == []
    steady = rounds[-1].runs[PLAIN][0]
    # Four prompts, of which the first two are cut to 6 and 12 tokens.
    assert steady.written == 6 + 3 * 12
    assert steady.steps == steady.written
    drafted = [run.drafted for each in rounds for run in each.runs["suffix" + HTTP]]
    assert sum(drafted) > 0


@pytest.mark.slow
def test_tables_lie_beside_the_results_and_a_second_call_measures_nothing(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written.with_suffix(".md").read_text(encoding="utf-8")
    assert "HTTP / in-process" in text
    assert len(list(written.parent.glob("cells-*.png"))) == 4
    before = written.read_text(encoding="utf-8")
    assert main(["--report", "--output", str(written)]) == 0
    assert capsys.readouterr().out.startswith(text)
    assert written.read_text(encoding="utf-8") == before
    start: dict[str, Any] = json.loads(before.splitlines()[0])
    assert start["settings"]["num_rounds"] == 2
    assert start["machine"]["processor"]


def test_a_drafter_that_no_model_has_is_refused_before_one_is_loaded(tmp_path: Path) -> None:
    arguments = ["--model", str(tmp_path / "no model"), "--way", "in-process"]
    arguments += ["--draft", f"second={BUNDLED / 'medusa'}"]
    arguments += ["--output", str(tmp_path / "cells.jsonl"), "--drafters", "second"]
    with pytest.raises(SystemExit, match="unknown drafter 'oracle'.*, second, "):
        main([*arguments, "oracle"])


def test_a_drafter_that_this_model_does_not_have_is_refused() -> None:
    options = parse_options(["--drafters", "ngram", "medusa"], "")
    with pytest.raises(SystemExit, match="unknown drafter 'medusa'.*nasd, ngram, "):
        ways_of(options, engine_info())
