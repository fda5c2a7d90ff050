"""``python -m bench``: runs the comparison, prints tables, writes JSON. Ends with 1 if speculation
changed a text where equality is promised."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.contenders import (
    GAMMA_0,
    LOOKUP_TOKENS,
    SAMPLINGS,
    Contender,
    EngineContender,
    TransformersContender,
    parse_drafter,
)
from bench.machine import describe_machine
from bench.models import BUNDLED, OWN, BenchModel, load_bench_model
from bench.options import Options, parse_options
from bench.progress import progress_bar
from bench.report import SCHEMA_VERSION, CellReport, report_cell, to_json
from bench.runner import Cell, contenders_for, make_jobs, measure_cell
from bench.tables import cell_tables
from bench.workloads import PromptSource, load_prompts
from drafters.registry import drafter_names
from engine.config import EngineConfig
from engine.drafting.drafts import parse_drafts, with_bundled_drafts
from engine.request.params import PLAIN


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    for text in options.drafters:
        parse_drafter(text, _known_drafters(options))
    models = [bench_model(name, options) for name in options.models]
    if options.output is not None:
        write_json(options.output, options, models)
    return 0 if all(equality_holds(model) for model in models) else 1


def bench_model(name: str, options: Options) -> dict[str, Any]:
    """Measure one model, print its tables, return its part of the JSON."""
    model = load_bench_model(name, engine_config(name, options), options.with_transformers)
    print(f"\n## {name}: {model.what}\n")
    contenders = make_contenders(model, options)
    reports = measure_model(model, options, contenders)
    return {
        "name": name,
        "what": model.what,
        "num_parameters": model.info.num_parameters,
        "num_layers": model.num_layers,
        "dtype": model.info.dtype,
        "device": model.info.device,
        "determinism": model.info.determinism,
        "exact_verified": model.info.exact_verified,
        "num_blocks": model.info.num_blocks,
        "block_size": model.info.block_size,
        "cells": [to_json(report) for report in reports],
    }


def engine_config(name: str, options: Options) -> EngineConfig:
    """No prefix cache unless asked for: a repeated prompt has to cost what a new one costs."""
    config = EngineConfig(
        model=BUNDLED if name in OWN else name,
        drafters=_wanted_drafters(options),
        draft=options.draft,
        prefix_layers=options.prefix_layers,
        quantized=options.quantized,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        determinism=options.determinism,
        max_num_seqs=max(options.batch_sizes),
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_cache=options.prefix_cache,
    )
    return with_bundled_drafts(config)


def _known_drafters(options: Options) -> list[str]:
    named = [each.name for each in parse_drafts(options.draft) if each.name is not None]
    return [*drafter_names(), *named]


def _wanted_drafters(options: Options) -> tuple[str, ...]:
    """Only those that are measured: a model that is not should take no memory."""
    known = _known_drafters(options)
    names = [parse_drafter(text, known)[1].draft_strategy for text in options.drafters]
    return ("none", *dict.fromkeys(names))


def make_contenders(model: BenchModel, options: Options) -> list[Contender]:
    contenders: list[Contender] = []
    if model.theirs is not None:
        pad = model.tokenizer.pad_token_id
        pad_token_id = int(pad) if isinstance(pad, int) else 0
        contenders += [
            TransformersContender(model.theirs, pad_token_id),
            TransformersContender(model.theirs, pad_token_id, LOOKUP_TOKENS),
        ]
    ways = [(GAMMA_0, PLAIN)]
    ways += [parse_drafter(text, sorted(model.info.drafters)) for text in options.drafters]
    contenders += [
        EngineContender(name, model.core, speculative, knows_prompts=options.prefix_cache)
        for name, speculative in ways
    ]
    return contenders


def measure_model(
    model: BenchModel, options: Options, contenders: Sequence[Contender]
) -> list[CellReport]:
    # As the server does: a full collection over what was loaded takes longer than several steps.
    gc.collect()
    gc.freeze()
    room = model.info.max_model_len - options.num_new_tokens
    source = PromptSource(model.tokenizer, model.info.vocab_size, room, options.data)
    cells = [
        Cell(workload, batch_size, SAMPLINGS[sampling])
        for workload in options.workloads
        for batch_size in options.batch_sizes
        for sampling in options.samplings
    ]
    plans = []
    for cell in cells:
        prompts = load_prompts(cell.workload, source, options.num_prompts, cell.batch_size)
        plans.append(
            (cell, make_jobs(cell, prompts, options.num_new_tokens, steady=options.steady))
        )
    num_runs = sum(
        len(jobs) * len(contenders_for(cell, contenders)) * options.num_rounds
        for cell, jobs in plans
    )
    reports = []
    with progress_bar(num_runs) as bar:
        for cell, jobs in plans:
            measured = measure_cell(cell, jobs, contenders, options.num_rounds, bar.step)
            reports.append(report_cell(measured))
            bar.write(cell_tables(reports[-1], model.what))
    return reports


def write_json(path: Path, options: Options, models: list[dict[str, Any]]) -> None:
    document = {
        "schema": SCHEMA_VERSION,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(torch.device(options.device)),
        "settings": options.to_json(),
        "models": models,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def equality_holds(model: dict[str, Any]) -> bool:
    """False, and a line for every case, if a drafter changed a text although the engine promised
    exactness."""
    different = [
        f"{cell['workload']}, batch {cell['batch_size']}, {cell['sampling']['name']}: {row['name']} "
        f"wrote the text of gamma 0 in {row['same_text']:.1%} of outputs"
        for cell in model["cells"]
        for row in cell["contenders"]
        if row["same_text"] not in (None, 1.0)
    ]
    if different:
        print(f"{model['name']} ({model['determinism']}): texts differ")
        print("\n".join(f"  {line}" for line in different))
    return not different or model["determinism"] != "exact"


if __name__ == "__main__":
    sys.exit(main())
