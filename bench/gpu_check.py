"""``python -m bench.gpu_check``: is speculation lossless on this device, and what does it gain?

Needs torch and transformers with what they bring; nothing of the server is imported. Runs on CUDA
where there is one, else on the CPU. Ends with 1 if an fp32 stream differs from gamma 0's, or if no
draft was accepted, so that nothing was tested.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.contenders import GAMMA_0, SAMPLINGS, Contender, EngineContender
from bench.equality import SPECULATIONS, EqualityResult, check_tiny_models, compare
from bench.machine import describe_machine
from bench.models import BUNDLED, SCALED, BenchModel, load_bench_model
from bench.report import SCHEMA_VERSION, report_cell, to_json
from bench.runner import Cell, make_jobs, measure_cell
from bench.tables import cell_tables, table
from bench.workloads import PromptSource, load_prompts
from engine.config import EngineConfig
from engine.params import SamplingParams, SpeculativeParams

_WORKLOADS = ("edit", "random")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = describe_machine(device)
    print("\n".join(f"{key}: {value}" for key, value in machine.items()), flush=True)

    exact = check_tiny_models(device, args.new_tokens)
    print("\n## fp32, tiny random models: must all be equal\n")
    print(equality_table(exact), flush=True)
    models = [_check_model(name, device, args) for name in args.model]
    if args.output is not None:
        document = {
            "schema": SCHEMA_VERSION,
            "machine": machine,
            "fp32_equality": [asdict(result) for result in exact],
            "fp32_holds": fp32_holds(exact),
            "models": models,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\nfp32 equality", "holds" if fp32_holds(exact) else "FAILS")
    return 0 if fp32_holds(exact) else 1


def fp32_holds(results: Sequence[EqualityResult]) -> bool:
    """All equal, and by more than luck: drafts were accepted and drafts were rejected."""
    num_drafted = sum(result.num_draft_tokens for result in results)
    num_accepted = sum(result.num_accepted_tokens for result in results)
    return all(result.holds for result in results) and 0 < num_accepted < num_drafted


def equality_table(results: Sequence[EqualityResult]) -> str:
    """One line per model and speculation, samplings and batch sizes together."""
    groups: dict[tuple[str, str], list[EqualityResult]] = {}
    for result in results:
        groups.setdefault((result.model, result.drafter), []).append(result)
    rows = []
    for (model, drafter), group in groups.items():
        num_drafted = sum(result.num_draft_tokens for result in group)
        num_accepted = sum(result.num_accepted_tokens for result in group)
        num_equal = sum(result.num_equal for result in group)
        num_streams = sum(result.num_streams for result in group)
        rows.append([f"{model}: {drafter}", str(num_drafted), str(num_accepted)])
        rows[-1] += [f"{num_equal} of {num_streams}", "" if num_equal == num_streams else "DIFFER"]
    return table(("speculation", "drafted", "accepted", "equal streams", ""), rows)


def _check_model(name: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Share of equal streams in the device's own bf16, then gamma 0 against ngram."""
    config = EngineConfig(
        device=str(device),
        determinism=args.determinism,
        max_num_seqs=max(args.batch),
        enable_prefix_cache=False,
    )
    model = load_bench_model(name, config, with_transformers=False)
    print(f"\n## {name}: {model.what}, determinism {model.info.determinism}\n")
    equality = _compare_model(model, args)
    print(equality_table(equality), flush=True)
    return {
        "name": name,
        "what": model.what,
        "num_parameters": model.info.num_parameters,
        "dtype": model.info.dtype,
        "determinism": model.info.determinism,
        "exact_verified": model.info.exact_verified,
        "num_blocks": model.info.num_blocks,
        "equality": [asdict(result) for result in equality],
        "equal_share": sum(r.num_equal for r in equality) / sum(r.num_streams for r in equality),
        "cells": _measure_model(model, args),
    }


def _source(model: BenchModel, num_new_tokens: int) -> PromptSource:
    room = model.info.max_model_len - num_new_tokens
    return PromptSource(model.tokenizer, model.info.vocab_size, room)


def _compare_model(model: BenchModel, args: argparse.Namespace) -> list[EqualityResult]:
    loaded = load_prompts("edit", _source(model, args.new_tokens), args.prompts)
    prompts = [prompt.token_ids for prompt in loaded]
    results = []
    for name, sampling in SAMPLINGS.items():
        params = SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p)
        results += compare(
            model.core, model.name, (name, params), prompts, args.new_tokens, SPECULATIONS
        )
    return results


def _measure_model(model: BenchModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    contenders: list[Contender] = [
        EngineContender(GAMMA_0, model.core, SpeculativeParams()),
        EngineContender("ngram", model.core, SpeculativeParams(drafter="ngram")),
    ]
    reports = []
    for workload in _WORKLOADS:
        for batch_size in args.batch:
            cell = Cell(workload, batch_size, SAMPLINGS["greedy"])
            count = -(-args.prompts // batch_size) * batch_size
            prompts = load_prompts(workload, _source(model, args.new_tokens), count)
            jobs = make_jobs(cell, prompts, args.new_tokens)
            measured = measure_cell(cell, jobs, contenders, args.rounds, lambda _: None)
            report = report_cell(measured)
            print(cell_tables(report, model.what), flush=True)
            reports.append(to_json(report))
    return reports


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--model", nargs="*", default=[BUNDLED, SCALED], help="bundled scaled")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--determinism", choices=["exact", "fast"], help="as the engine's")
    parser.add_argument("--output", type=Path, help="write all figures as JSON to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
