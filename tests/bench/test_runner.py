"""Contenders take turns, and every one does every job of every round."""

from __future__ import annotations

import pytest

from bench.contenders import (
    SAMPLINGS,
    Account,
    ContenderFailedError,
    Job,
    Run,
    SteppedContender,
    Steps,
    _more_prompts_seconds,
    parse_drafter,
)
from bench.runner import Cell, make_jobs, measure_cell, measure_rounds
from bench.workloads import Prompt
from engine.request.params import PLAIN
from engine.request.stats import StepStats

PROMPTS = [Prompt((token,), (token, token)) for token in range(1, 6)]


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


def test_contenders_take_turns_after_a_short_run_that_is_not_timed() -> None:
    log: list[tuple[str, Job]] = []
    ticks: list[str] = []
    contenders = [LoggingContender(name, log, None) for name in ("a", "b")]
    jobs = make_jobs(cell(1), PROMPTS[:2], 64)
    measured = measure_cell(cell(1), jobs, contenders, 2, ticks.append)
    assert "".join(name for name, _ in log) == "ab" + "ab" + "ba" + "ba" + "ab"
    assert [job.num_new_tokens for _, job in log] == [4, 4, *[64] * 8]
    assert len(ticks) == 8
    for name in ("a", "b"):
        assert [len(each) for each in measured.runs[name]] == [2, 2]
        assert [job for who, job in log[2:] if who == name] == [*jobs, *jobs]


def test_those_that_begin_together_are_cut_short_so_that_they_end_apart() -> None:
    steady, closed = (make_jobs(cell(2), PROMPTS[:4], 9, steady=each) for each in (True, False))
    assert steady[0].lengths == (5, 9, 9, 9)
    assert steady[0].num_tokens == 32
    assert [job.lengths for job in closed] == [(9, 9), (9, 9)]


class Walker(SteppedContender):
    """Takes so many steps of so many seconds each."""

    def __init__(self, name: str, log: list[str], num_steps: int, seconds: float) -> None:
        super().__init__(name, None, PLAIN)  # type: ignore[arg-type]
        self._log, self._each = log, [seconds] * num_steps

    def steps(self, job: Job) -> Steps:
        for seconds in self._each:
            self._log.append(self.name)
            yield seconds
        return Run(((1,),) * len(job.prompts), sum(self._each), 0.0, 0, 0)


def test_who_can_be_stepped_changes_with_the_others_before_its_run_is_over() -> None:
    """The one that has taken least time is next, for a twentieth of a second at least."""
    log: list[str] = []
    contenders = [Walker("a", log, 6, 0.0251), Walker("b", log, 3, 0.1), Walker("c", log, 1, 0.5)]
    jobs = make_jobs(cell(1), PROMPTS[:1], 64)
    (only,) = measure_rounds(cell(1), jobs, contenders, [0], lambda _: None)
    assert "".join(log) == 2 * "aabcaabaab"
    assert {name: run.seconds for name, (run,) in only.runs.items()} == pytest.approx(
        {"a": 0.1506, "b": 0.3, "c": 0.5}
    )
    assert not any(run.joules for (run,) in only.runs.values())


def test_rounds_come_one_by_one_with_their_numbers() -> None:
    log: list[tuple[str, Job]] = []
    contenders = [LoggingContender(name, log, None) for name in ("a", "b")]
    jobs = make_jobs(cell(1), PROMPTS[:1], 64)
    rounds = measure_rounds(cell(1), jobs, contenders, [1, 4], lambda _: None)
    assert next(rounds).number == 1
    # Two that are not timed, and a round whose number says that the second goes first.
    assert "".join(name for name, _ in log) == "ab" + "ba"
    assert [each.number for each in rounds] == [4]
    assert "".join(name for name, _ in log) == "ab" + "ba" + "ab"


class FailingContender(LoggingContender):
    """Has had enough after so many runs."""

    def run(self, job: Job) -> Run:
        if len(self._log) == 2:
            raise ContenderFailedError("enough")
        return super().run(job)


def test_who_fails_in_a_later_round_was_whole_in_the_earlier_ones() -> None:
    contenders = [FailingContender("weak", [], None), LoggingContender("strong", [], None)]
    jobs = make_jobs(cell(1), PROMPTS[:1], 64)
    first, second = measure_rounds(cell(1), jobs, contenders, range(2), lambda _: None)
    assert (list(first.runs), first.failed) == (["weak", "strong"], {})
    assert (list(second.runs), second.failed) == (["strong"], {"weak": "enough"})
    contenders[0] = FailingContender("weak", [], None)
    measured = measure_cell(cell(1), jobs, contenders, 2, lambda _: None)
    assert (list(measured.runs), measured.failed) == (["strong"], {"weak": "enough"})


def test_a_contender_that_cannot_batch_sits_larger_batches_out() -> None:
    contenders = [LoggingContender("lone", [], 1), LoggingContender("any", [], None)]
    jobs = make_jobs(cell(2), PROMPTS, 8)
    assert list(measure_cell(cell(2), jobs, contenders, 1, lambda _: None).runs) == ["any"]


@pytest.mark.parametrize(
    ("text", "name", "width", "policy", "num_tokens", "options"),
    [
        ("ngram", "ngram", 1, "goodput", 8, {}),
        ("ngramx3", "ngram tree 3", 3, "goodput", 8, {}),
        ("nasd:5", "nasd fixed 5", 1, "fixed", 5, {}),
        ("nasdx2:5", "nasd tree 2 fixed 5", 2, "fixed", 5, {}),
        ("nasdx2+share", "nasd tree 2 share", 2, "goodput", 8, {"share": True}),
        ("nasd+n=4", "nasd n=4", 1, "goodput", 8, {"n": 4}),
    ],
)
def test_drafters_are_named_with_shape_gamma_and_options(
    text: str, name: str, width: int, policy: str, num_tokens: int, options: dict[str, object]
) -> None:
    told, params = parse_drafter(text, ["none", "ngram", "nasd"])
    assert (told, params.shape.width, params.options) == (name, width, options)
    assert (params.adaptive_depth, params.num_speculative_tokens) == (policy, num_tokens)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((each, "known: ngram") for each in ("none", "oracle", "oracle:4", "")),
        *((f"ngram:{each}", "number of draft tokens") for each in ("0", "x", "-1", "")),
        ("ngramx0", "drafter|after the"),
        ("ngram+ngram_min=many", "'many' is no number"),
    ],
)
def test_what_names_no_drafting_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_drafter(text, ["none", "ngram"])


def test_second_turns_follow_each_contender_s_own_answers() -> None:
    """Answers end where the model ended its turn; who has no second turn takes no part in it."""
    log: list[tuple[str, Job]] = []
    contender = LoggingContender("a", log, None)
    prompts = [Prompt((7,), follow_up=(1, 8)), Prompt((6,)), Prompt((5,), follow_up=(9, 8))]
    (job,) = make_jobs(cell(3), prompts, 4)
    assert job.longest == 1 + 4 + 2 + 4
    measured = measure_cell(cell(3), (job,), [contender], 1, lambda _: None)
    # One round, after a short run ahead of it that has two turns as well.
    second = ((7, 1, 8), (5, 1, 1, 1, 1, 9, 8))
    assert [each.prompts for _, each in log[2:]] == [job.prompts, second]
    ((run,),) = measured.runs["a"]
    assert [len(each) for each in run.output_token_ids] == [4] * 5
    assert (run.seconds, run.num_request_steps, run.account) == (2.0, 2, None)


def test_accounts_of_two_turns_add_up() -> None:
    first, second = (
        Run(((1,),), 1.0, 0.5, 1, 2, Account(num_draft_tokens=count, draft_seconds=0.5))
        for count in (3, 4)
    )
    assert first.then(second).account == Account(num_draft_tokens=7, draft_seconds=1.0)


def test_prompts_that_happen_to_be_read_meanwhile_count_as_many_as_usual() -> None:
    plain, reading = StepStats(step_seconds=1.0), StepStats(step_seconds=3.0, num_prompt_tokens=10)
    steps = [plain, reading, plain, reading]
    assert _more_prompts_seconds(steps, 20.0) == 0.0
    assert _more_prompts_seconds(steps, 15.0) == -1.0
    assert _more_prompts_seconds(steps, 40.0) == 4.0
    assert _more_prompts_seconds([plain], 5.0) == _more_prompts_seconds([reading], 5.0) == 0.0
