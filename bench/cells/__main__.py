"""``python -m bench.cells``: where do drafts pay? Cells of workload, sampling, load and requests at
once, in each of which plain decoding, the default drafter, ``auto`` and others take turns; ratios have
intervals.

Results are kept round by round: a call that was cut short goes on where it was when it is made
again. Ends with 1 if a drafter changed a text.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from bench.cells.contenders import check_drafters, load_core, started_contenders
from bench.cells.groups import groups_of
from bench.cells.options import Options, parse_options
from bench.cells.picture import can_draw, draw_all
from bench.cells.plan import CellPlan, Pace, make_plans, measure_pace, missing_rounds
from bench.cells.records import Results, RoundRecord, record_run
from bench.cells.report import different_texts, report
from bench.contenders import Contender, ContenderFailedError
from bench.machine import describe_machine
from bench.models import BenchModel
from bench.progress import progress_bar
from bench.runner import measure_rounds
from bench.workloads import PromptSource
from engine.process.preload import preload_environment


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.perf_counter()
    options = parse_options(arguments, (__doc__ or "").partition(": ")[2])
    try:
        results = Results(options.output)
    except ValueError as error:
        sys.exit(str(error))
    if not options.report_only:
        # The server is ended by what ends a with-statement, which a signal alone does not.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            measure(options, results, began)
        finally:
            signal.signal(signal.SIGTERM, previous)
    if results.rounds:
        text = report(results.rounds)
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
        print(text)
        if can_draw():
            draw_all(groups_of(results.rounds), options.output)
        else:
            print("no pictures without matplotlib: pip install -e '.[plot]'")
    return 1 if different_texts(results.rounds) else 0


def measure(options: Options, results: Results, began: float) -> None:
    """Measures what is missing, as far as time allows."""
    check_drafters(options)
    model = load_core(options)
    try:
        with started_contenders(options, model) as contenders:
            _measure(options, model, contenders, results, began)
    except ContenderFailedError as error:
        sys.exit(f"the server cannot be measured: {error}")


def _measure(
    options: Options,
    model: BenchModel,
    contenders: Sequence[Contender],
    results: Results,
    began: float,
) -> None:
    room = model.info.max_model_len - options.num_new_tokens
    source = PromptSource(
        *(model.tokenizer, model.info.vocab_size, room, options.data),
        *(options.questions, options.num_new_tokens),
    )
    plans = make_plans(options, source, contenders)
    # As the server does: a full collection over what was loaded takes longer than several steps.
    gc.collect()
    gc.freeze()
    pace = measure_pace(plans, contenders[0])
    _tell(plans, pace, results, options)
    if options.predict_only:
        return
    results.start(
        {
            "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(torch.device(options.device)),
            "settings": options.to_json(),
            "model": model.what,
        }
    )
    end = None if options.seconds is None else began + options.seconds
    _measure_plans(plans, contenders, pace, results, options, end)


def _tell(plans: Sequence[CellPlan], pace: Pace, results: Results, options: Options) -> None:
    left = [(plan, missing_rounds(plan, results, options.num_rounds)) for plan in plans]
    seconds = sum(pace.round_seconds(plan) * len(rounds) for plan, rounds in left)
    num_left = sum(bool(rounds) for _, rounds in left)
    print(
        f"{num_left} of {len(plans)} cells to measure with {', '.join(plans[0].key.contenders)}: "
        f"at most about {seconds / 60:.0f} minutes",
        flush=True,
    )


def _measure_plans(
    plans: Sequence[CellPlan],
    contenders: Sequence[Contender],
    pace: Pace,
    results: Results,
    options: Options,
    end: float | None,
) -> None:
    wanted = [(plan, missing_rounds(plan, results, options.num_rounds)) for plan in plans]
    num_runs = sum(len(rounds) * len(plan.jobs) * len(contenders) for plan, rounds in wanted)
    with progress_bar(num_runs) as bar:
        for plan, rounds in wanted:
            seconds = pace.round_seconds(plan)
            in_time = (
                number for number in rounds if end is None or time.perf_counter() + seconds < end
            )
            if not rounds or (end is not None and time.perf_counter() + seconds >= end):
                continue
            for each in measure_rounds(plan.cell, plan.jobs, contenders, in_time, bar.step):
                runs = {
                    name: tuple(record_run(run, plan.key.steady) for run in runs)
                    for name, runs in each.runs.items()
                }
                results.add(
                    RoundRecord(plan.key, each.number, plan.mean_prompt_tokens, runs, each.failed)
                )


if __name__ == "__main__":
    if preload := preload_environment():
        # The engine's process is given these libraries by the server.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "bench.cells", *sys.argv[1:]],
            {**os.environ, **preload},
        )
    sys.exit(main())
