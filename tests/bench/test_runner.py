"""Contenders take turns, and every one does every job of every round."""

from __future__ import annotations

import pytest

from bench.contenders import SAMPLINGS, Job, Run, parse_drafter
from bench.runner import Cell, make_jobs, measure_cell
from bench.workloads import Prompt
from engine.request.params import SpeculativeParams


class LoggingContender:
    """Writes down when it was asked to do what."""

    def __init__(self, name: str, log: list[tuple[str, Job]], max_batch_size: int | None) -> None:
        self.name = name
        self.max_batch_size = max_batch_size
        self._log = log

    def run(self, job: Job) -> Run:
        self._log.append((self.name, job))
        outputs = tuple((1,) * job.num_new_tokens for _ in job.prompts)
        return Run(outputs, 1.0, 1.0, 1, 1)


def cell(batch_size: int) -> Cell:
    return Cell("code", batch_size, SAMPLINGS["greedy"])


PROMPTS = [Prompt((token,), (token, token)) for token in range(1, 6)]


def test_jobs_are_full_batches_in_order_with_the_seeds_of_their_prompts() -> None:
    jobs = make_jobs(cell(2), PROMPTS, 8)
    assert [job.prompts for job in jobs] == [((1,), (2,)), ((3,), (4,))]
    assert [job.expected for job in jobs] == [((1, 1), (2, 2)), ((3, 3), (4, 4))]
    # Request i of a job is seeded ``seed + i``, so a prompt has one seed at every batch size.
    alone = make_jobs(cell(1), PROMPTS, 8)
    assert [job.seed for job in jobs] == [alone[0].seed, alone[2].seed]


def test_a_steady_job_has_all_prompts_and_keeps_a_batch_running() -> None:
    (job,) = make_jobs(cell(2), PROMPTS, 8, steady=True)
    assert job.prompts == ((1,), (2,), (3,), (4,), (5,))
    assert job.num_running == 2


def test_contenders_take_turns_and_who_goes_first_changes() -> None:
    log: list[tuple[str, Job]] = []
    contenders = [LoggingContender(name, log, None) for name in ("a", "b")]
    jobs = make_jobs(cell(1), PROMPTS[:2], 8)
    measured = measure_cell(cell(1), jobs, contenders, 2, lambda _: None)
    names = "".join(name for name, _ in log)
    assert names == "ab" + "ab" + "ba" + "ba" + "ab"  # untimed runs first
    for name in ("a", "b"):
        assert [[len(round_) for round_ in measured.runs[name]]] == [[2, 2]]
        timed = [job for who, job in log[2:] if who == name]
        assert timed == [*jobs, *jobs]


def test_the_untimed_run_is_short() -> None:
    log: list[tuple[str, Job]] = []
    contender = LoggingContender("a", log, None)
    measure_cell(cell(1), make_jobs(cell(1), PROMPTS[:1], 64), [contender], 1, lambda _: None)
    assert [job.num_new_tokens for _, job in log] == [4, 64]


def test_a_contender_that_cannot_batch_sits_larger_batches_out() -> None:
    log: list[tuple[str, Job]] = []
    contenders = [LoggingContender("lone", log, 1), LoggingContender("any", log, None)]
    jobs = make_jobs(cell(2), PROMPTS, 8)
    assert list(measure_cell(cell(2), jobs, contenders, 1, lambda _: None).runs) == ["any"]


def test_progress_hears_of_every_timed_run() -> None:
    ticks: list[str] = []
    contenders = [LoggingContender(name, [], None) for name in ("a", "b")]
    measure_cell(cell(1), make_jobs(cell(1), PROMPTS, 8), contenders, 3, ticks.append)
    assert len(ticks) == 2 * 5 * 3


def test_a_drafter_is_named_alone_or_with_a_fixed_gamma() -> None:
    assert parse_drafter("ngram", ["none", "ngram"]) == (
        "ngram",
        SpeculativeParams(draft_strategy="ngram"),
    )
    assert parse_drafter("ngram:4", ["none", "ngram"]) == (
        "ngram fixed 4",
        SpeculativeParams(draft_strategy="ngram", adaptive_depth="fixed", num_speculative_tokens=4),
    )


def test_a_drafters_options_follow_a_plus() -> None:
    name, params = parse_drafter("standx2+share+max_contexts=64", ["none", "stand"])
    assert name == "stand tree 2 share max_contexts=64"
    assert params.options == {"share": True, "max_contexts": 64}
    with pytest.raises(ValueError, match="'many' is no number"):
        parse_drafter("stand+max_contexts=many", ["stand"])


@pytest.mark.parametrize("text", ["none", "oracle", "oracle:4", ""])
def test_unknown_drafters_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="known: ngram"):
        parse_drafter(text, ["none", "ngram"])


@pytest.mark.parametrize("text", ["ngram:0", "ngram:x", "ngram:-1"])
def test_a_gamma_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of draft tokens"):
        parse_drafter(text, ["ngram"])
