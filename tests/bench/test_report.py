"""Ratios and shares, worked by hand on made-up timings."""

from __future__ import annotations

import pytest

from bench.contenders import GAMMA_0, SAMPLINGS, TRANSFORMERS, Account, Job, Run
from bench.report import Agreement, report_cell, same_text, summarise, to_json
from bench.runner import Cell, Measured
from bench.tables import cell_tables

TEXT = (5, 6, 7, 8)
OTHER = (5, 6, 9, 9)
ACCOUNT = Account(
    num_request_steps=2,
    num_draft_tokens=4,
    num_accepted_tokens=2,
    num_emitted_tokens=4,
    baseline_seconds=3.0,
    step_seconds=2.0,
    num_decode_steps=2,
    decode_step_seconds=0.020,
    draft_seconds=0.001,
    forward_seconds=0.016,
    verify_seconds=0.002,
    other_seconds=0.001,
)


def run(
    seconds: float,
    output: tuple[int, ...] = TEXT,
    decode_seconds: float = 1.0,
    num_request_steps: int = 4,
    account: Account | None = None,
) -> Run:
    return Run((output,), seconds, decode_seconds, len(output) - 1, num_request_steps, account)


def measured(sampling: str = "greedy") -> Measured:
    cell = Cell("edit", 1, SAMPLINGS[sampling])
    jobs = (Job(((1, 2, 3),), 4, cell.sampling, 0), Job(((1, 2, 3, 4, 5),), 4, cell.sampling, 1))
    theirs, ours = [run(2.0), run(2.0, OTHER)], [run(1.0, account=ACCOUNT)] * 2
    return Measured(cell, jobs, {TRANSFORMERS: [theirs], GAMMA_0: [ours]})


def test_ratio_divides_sums_over_jobs_of_medians_over_rounds() -> None:
    # Medians: gamma 0 takes 4 + 6, the contender 2 + 3; the slow outliers do not count.
    gamma_0 = [[run(4.0), run(6.0)], [run(90.0), run(6.0)], [run(3.0), run(5.0)]]
    own = [[run(2.0), run(3.0)], [run(2.0), run(80.0)], [run(1.0), run(2.0)]]
    summary = summarise("ngram", own, gamma_0, None)
    assert summary.ratio == pytest.approx(10.0 / 5.0)
    assert summary.tokens_per_second == pytest.approx(8 / 5.0)
    assert summary.vs_transformers is None
    own_name = summarise(GAMMA_0, gamma_0, gamma_0, [[run(15.0)] * 2])
    assert (own_name.ratio, own_name.vs_transformers) == (1.0, pytest.approx(3.0))


def test_ratio_range_is_of_whole_rounds() -> None:
    gamma_0 = [[run(4.0), run(2.0)], [run(6.0), run(6.0)]]
    own = [[run(2.0), run(2.0)], [run(2.0), run(2.0)]]
    assert summarise("ngram", own, gamma_0, None).ratio_range == pytest.approx((1.5, 3.0))


def test_decode_ratio_leaves_the_time_to_first_tokens_out() -> None:
    gamma_0 = [[run(10.0, decode_seconds=3.0)]]
    own = [[run(8.0, decode_seconds=1.0)]]
    summary = summarise("ngram", own, gamma_0, None)
    assert summary.decode_tokens_per_second == summary.decode_ratio == pytest.approx(3.0)


def test_tokens_per_step_counts_forwards_per_request() -> None:
    own = [[run(1.0, num_request_steps=2), run(1.0, num_request_steps=3)]]
    assert summarise("lookup", own, None, None).tokens_per_step == pytest.approx(8 / 5)


def test_engine_figures_come_from_the_accounts_of_all_runs() -> None:
    own = [[run(1.0, account=ACCOUNT)], [run(1.0, account=ACCOUNT)]]
    summary = summarise("ngram", own, [[run(2.0)], [run(2.0)]], None)
    assert summary.num_draft_tokens == 8
    assert summary.acceptance_rate == pytest.approx(0.5)
    assert summary.estimated_speedup == pytest.approx(1.5)
    ms = summary.step_ms
    assert ms is not None
    told = (ms.step, ms.forward, ms.outside_forward, ms.share_outside_forward)
    assert told == pytest.approx((10.0, 8.0, 2.0, 0.2))
    nothing_drafted = [[run(1.0, account=Account(num_request_steps=4, num_emitted_tokens=4))]]
    assert summarise(GAMMA_0, nothing_drafted, nothing_drafted, None).acceptance_rate is None


def test_a_contender_without_an_account_has_no_engine_figures() -> None:
    summary = summarise(TRANSFORMERS, [[run(1.0)]], [[run(1.0)]], None)
    told = (summary.step_ms, summary.acceptance_rate, summary.estimated_speedup, summary.same_text)
    assert told == (None, None, None, None)


def test_same_text_holds_every_round_against_the_first_of_gamma_0() -> None:
    gamma_0 = [[run(1.0)], [run(1.0, OTHER)]]
    assert same_text([[run(1.0)], [run(1.0)]], gamma_0) == 1.0
    assert same_text([[run(1.0)], [run(1.0, OTHER)]], gamma_0) == 0.5
    assert same_text(gamma_0, gamma_0) == 0.5


def test_a_cell_says_what_was_run_and_how_far_greedy_texts_agree() -> None:
    report = report_cell(measured())
    assert (report.num_prompts, report.mean_prompt_tokens, report.num_new_tokens) == (2, 4.0, 4)
    assert [summary.name for summary in report.contenders] == [TRANSFORMERS, GAMMA_0]
    assert to_json(report)["contenders"][1]["step_ms"]["outside_forward"] == pytest.approx(2.0)
    # One output equal, the other up to its third token of four.
    assert report.transformers_agreement == Agreement(0.5, 0.75)
    assert report_cell(measured("sampled")).transformers_agreement is None


def test_tables_name_the_model_line_up_and_leave_gaps_for_what_is_unknown() -> None:
    text = cell_tables(report_cell(measured()), "the scaled copy (0.4 B)")
    assert "the scaled copy (0.4 B)" in text
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    rows = {line[0].strip(): [each.strip() for each in line] for line in lines if len(line) == 10}
    assert (rows[TRANSFORMERS][2], rows[TRANSFORMERS][8]) == ("0.50x", "-")
    assert rows[GAMMA_0][6] == "2.00x"
