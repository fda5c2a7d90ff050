"""``python -m bench.gpu_check``: is everything right on this device, and what is it worth?

Needs torch and transformers with what they bring, and triton on a GPU; nothing of the server is
imported. In turn:

1. every attention backend on tiny models: logits against transformers', bits of a row however steps
   are cut, tokens that flip (none under ``exact``); what products of layers cost that keep a row's bits,
   in bf16 and in 4 bits, beside the library's in bf16;
2. texts of tiny fp32 models with speculation and without, on every backend that knows the type: all
   equal;
3. a model of 8 billion parameters in bf16 (``--large none``: not): a step of one row against the
   memory's bandwidth, and what graphs save;
4. a model's texts with speculation and without, and what ``ngram`` and ``suffix`` gain on edits and
   code, beside transformers' own ``generate``.

``--toy`` takes sizes that an interpreter on a CPU has time for. Ends with 1 if a backend or a product is
wrong, if an fp32 stream differs from gamma 0's, or if no draft was accepted, so that nothing was tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
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
)
from bench.equality import (
    SPECULATIONS,
    TINY_MODELS,
    EqualityResult,
    check_tiny_models,
    compare,
)
from bench.gpu.backends import BackendResult, best_backend, check_backends
from bench.gpu.products import (
    ROW_COUNTS,
    SHAPES,
    TOY_ROW_COUNTS,
    TOY_SHAPES,
    ProductResult,
    check_products,
)
from bench.gpu.roofline import copy_bandwidth, graph_gains, roofline
from bench.machine import describe_machine
from bench.models import BUNDLED, LARGE, BenchModel, load_bench_model
from bench.report import SCHEMA_VERSION, report_cell, to_json
from bench.runner import Cell, make_jobs, measure_cell
from bench.tables import cell_tables, table
from bench.workloads import PromptSource, load_prompts
from engine.config import EngineConfig
from engine.kernels.triton import missing_for
from engine.model.runner import ModelRunner
from engine.request.params import PLAIN, SamplingParams, SpeculativeParams

_TOY = {
    "large": "none",
    "model": [],
    "new_tokens": 8,
    "flip_tokens": 24,
}
_TOY_SAMPLINGS = ("T 0.7, top-p 0.9",)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.toy:
        vars(args).update(_TOY)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    document: dict[str, Any] = {"schema": SCHEMA_VERSION, "machine": describe_machine(device)}
    print("\n".join(f"{key}: {value}" for key, value in document["machine"].items()), flush=True)
    seconds: dict[str, float] = {}
    with _part("attention backends", seconds):
        backends = check_backends(device, args.flip_tokens, args.backend, _models(args))
        print(backend_table(backends), flush=True)
    with _part("products of layers in bf16, exact beside fast", seconds):
        products = _check_products(device, args)
        print(product_table(products), flush=True)
    with _part("fp32, tiny random models: must all be equal", seconds):
        exact = _check_texts(device, backends, args)
        print(equality_table(exact), flush=True)
    document |= {
        "backends": [asdict(result) | {"holds": result.holds} for result in backends],
        "products": [asdict(result) | {"holds": result.holds} for result in products],
        "best_backend": best_backend(device),
        "fp32_equality": [asdict(result) for result in exact],
        "fp32_holds": fp32_holds(exact),
    }
    if args.large != "none":
        with _part(f"bandwidth and graphs: {args.large}", seconds):
            document["large"] = _measure_large(device, args)
    with _part("speculation", seconds):
        document["models"] = [_check_model(name, device, args) for name in args.model]
    document["seconds"] = seconds
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    is_right = bool(backends) and all(result.holds for result in backends)
    are_exact = bool(products) and all(result.holds for result in products)
    print("\nbackends", "hold" if is_right else "FAIL")
    print("products", "hold" if are_exact else "FAIL")
    print("fp32 equality", "holds" if fp32_holds(exact) else "FAILS")
    return 0 if is_right and are_exact and fp32_holds(exact) else 1


def _models(args: argparse.Namespace) -> Sequence[str]:
    return TINY_MODELS[-1:] if args.toy else TINY_MODELS


@contextmanager
def _part(title: str, seconds: dict[str, float]) -> Iterator[None]:
    print(f"\n## {title}\n", flush=True)
    start = time.perf_counter()
    yield
    seconds[title] = time.perf_counter() - start


def fp32_holds(results: Sequence[EqualityResult]) -> bool:
    """All equal, and by more than luck: drafts were accepted and drafts were rejected."""
    num_drafted = sum(result.num_draft_tokens for result in results)
    num_accepted = sum(result.num_accepted_tokens for result in results)
    return all(result.holds for result in results) and 0 < num_accepted < num_drafted


def backend_table(results: Sequence[BackendResult]) -> str:
    rows = [
        [
            f"{each.backend}, {each.determinism}, {each.dtype}: {each.model}",
            f"{each.error:.1e}",
            {True: "yes", False: "no", None: "-"}[each.same_bits],
            f"{each.flip_rate:.2%}",
            "" if each.holds else "WRONG",
        ]
        for each in results
    ]
    return table(("backend", "error", "same bits", "flips", ""), rows)


def product_table(results: Sequence[ProductResult]) -> str:
    """With the seconds of as many rows as were measured, over those of ``fast``."""
    counts = sorted({count for each in results for count in each.seconds})
    rows = [
        [
            f"{each.in_features} by {each.out_features}, {each.dtype}",
            "yes" if each.keeps_bits else "no",
            f"{each.error:.1e}",
            *(f"{each.ratio(count):.2f}x" for count in counts),
            "" if each.holds else "WRONG",
        ]
        for each in results
    ]
    return table(
        ("product", "same bits", "error", *(f"{count} rows" for count in counts), ""), rows
    )


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


def _check_products(device: torch.device, args: argparse.Namespace) -> list[ProductResult]:
    """On a CPU the GPU's product runs under its interpreter, at toy sizes alone."""
    if missing_for(device) is not None:
        return []
    if device.type == "cuda" and not args.toy:
        return check_products(device, SHAPES, ROW_COUNTS)
    return check_products(device, TOY_SHAPES, TOY_ROW_COUNTS)


def _check_texts(
    device: torch.device, backends: Sequence[BackendResult], args: argparse.Namespace
) -> list[EqualityResult]:
    """On every backend that ``fast`` may have, and that computes in fp32."""
    asked = ("fast", "float32")
    names = sorted({each.backend for each in backends if (each.determinism, each.dtype) == asked})
    kinds = {"samplings": _TOY_SAMPLINGS} if args.toy else {}
    results = []
    for name in names:
        found = check_tiny_models(device, args.new_tokens, name, _models(args), **kinds)
        results += [replace(each, model=f"{each.model} on {name}") for each in found]
    return results


def _measure_large(device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        device=str(device), determinism=args.determinism, max_num_seqs=max(args.batch)
    )
    model = load_bench_model(args.large, config, with_transformers=False)
    print(f"{model.what}, attention {model.info.attention_backend}", flush=True)
    runner = model.core.runner
    assert isinstance(runner, ModelRunner)
    bandwidth = copy_bandwidth(device)
    # A scaled copy keeps the bundled model's few key heads and its context of 2,048.
    lines = [roofline(runner, bandwidth, count) for count in (0, 1024)]
    gains = graph_gains(runner, [size for size in args.batch if size <= 64], 256)
    for line in lines:
        print(
            f"one row after {line.num_kv_tokens} tokens: {line.seconds * 1e3:.2f} ms for "
            f"{line.num_bytes / 1e9:.1f} GB, {line.share:.0%} of {line.bandwidth / 1e12:.2f} TB/s"
        )
    for gain in gains:
        print(
            f"{gain.batch_size} rows: {gain.seconds * 1e3:.2f} ms with graphs, "
            f"{gain.eager_seconds * 1e3:.2f} without, {gain.gain:.2f}x"
        )
    return {
        "what": model.what,
        "attention_backend": model.info.attention_backend,
        "num_parameters": model.info.num_parameters,
        "roofline": [asdict(line) | {"share": line.share} for line in lines],
        "graphs": [asdict(gain) | {"gain": gain.gain} for gain in gains],
    }


def _check_model(name: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Share of equal streams in the device's own type, then gamma 0 against drafters and transformers."""
    config = EngineConfig(
        device=str(device),
        determinism=args.determinism,
        max_num_seqs=max(args.batch),
        enable_prefix_cache=False,
    )
    model = load_bench_model(name, config, with_transformers=True)
    print(f"\n### {name}: {model.what}, determinism {model.info.determinism}\n")
    equality = _compare_model(model, args)
    print(equality_table(equality), flush=True)
    return {
        "name": name,
        "what": model.what,
        "num_parameters": model.info.num_parameters,
        "dtype": model.info.dtype,
        "determinism": model.info.determinism,
        "attention_backend": model.info.attention_backend,
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


def _contenders(model: BenchModel) -> list[Contender]:
    contenders: list[Contender] = [EngineContender(GAMMA_0, model.core, PLAIN)]
    for drafter in ("ngram", "suffix"):
        drafting = SpeculativeParams(draft_strategy=drafter)
        contenders.append(EngineContender(drafter, model.core, drafting))
    if model.theirs is not None:
        pad = model.tokenizer.pad_token_id or 0
        contenders += [
            TransformersContender(model.theirs, pad),
            TransformersContender(model.theirs, pad, LOOKUP_TOKENS),
        ]
    return contenders


def _measure_model(model: BenchModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    contenders = _contenders(model)
    reports = []
    for workload in args.workload:
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
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--toy", action="store_true", help="parts 1 and 2 alone, at small sizes")
    parser.add_argument(
        "--backend", nargs="+", help="default: all that serve; one has to know fp32"
    )
    parser.add_argument("--large", default=LARGE, help="a model's name or path; none: no part 3")
    parser.add_argument("--model", nargs="*", default=[BUNDLED], help="bundled scaled large")
    parser.add_argument("--workload", nargs="+", default=["edit", "code"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--flip-tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--determinism", choices=["exact", "fast"], help="as the engine's")
    parser.add_argument("--output", type=Path, help="write all figures as JSON to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
