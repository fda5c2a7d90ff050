"""``python -m bench.gpu_check``: is everything right on this device, and what is it worth?

Needs torch and transformers with what they bring, and triton on a GPU; nothing of the server is
imported. ``--part``: some of these alone, each in its own time (``PARTS``; ``docs/gpu.md``: in which
order). Figures are written as they come: a call that was cut has what it had.

- ``backends``: every attention backend on tiny models: logits against transformers', bits of a row
  however steps are cut, tokens that flip (none under ``exact``).
- ``products``: what products of layers cost that keep a row's bits, in bf16 and in 4 bits, beside
  the library's in bf16.
- ``texts``: of tiny fp32 models with speculation and without, on every backend that knows the type: all
  equal; of ``--model`` under ``exact`` and ``fast``: the share that is equal.
- ``8b``, ``8b-int4``, ``smollm2``: steps of models of these shapes with random weights, under ``fast``
  and ``exact``, beside the same model as torch compiles it, and how long the device is idle in between.
- ``drafts``: what drafters gain over plain decoding on ``--model``.

``--toy`` takes sizes that an interpreter on a CPU has time for. Ends with 1 if a backend or a product is
wrong, if an fp32 stream differs from gamma 0's, or if no draft was accepted, so that nothing was tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from bench.contenders import (
    GAMMA_0,
    SAMPLINGS,
    Contender,
    EngineContender,
)
from bench.equality import (
    SPECULATIONS,
    TINY_MODELS,
    EqualityResult,
    check_tiny_models,
    compare,
)
from bench.gpu.backends import BackendResult, check_backends, serving_backends
from bench.gpu.products import (
    ROW_COUNTS,
    SHAPES,
    TOY_ROW_COUNTS,
    TOY_SHAPES,
    ProductResult,
    check_products,
)
from bench.gpu.steps import (
    StepTime,
    compiled_step,
    copy_bandwidth,
    device_account,
    own_step,
    random_model,
    round_model,
    weight_bytes,
)
from bench.machine import describe_machine
from bench.models import BUNDLED, BenchModel, core_of, load_bench_model
from bench.report import SCHEMA_VERSION, report_cell, to_json
from bench.runner import Cell, make_jobs, measure_cell
from bench.tables import cell_tables
from bench.workloads import PromptSource, load_prompts
from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.kernels.triton import missing_for
from engine.model.runner import ModelRunner
from engine.request.errors import UnsupportedModelError
from engine.request.info import Determinism
from engine.request.params import PLAIN, SamplingParams, SpeculativeParams
from slipstream.client.markdown import markdown_table

_TOY = {
    "tiny": TINY_MODELS[-1:],
    "model": [],
    "new_tokens": 8,
    "flip_tokens": 24,
    "batch": [1, 2],
    "kv_tokens": 8,
}
_TOY_SAMPLINGS = ("T 0.7, top-p 0.9",)


class Ledger:
    """The findings so far. ``put`` writes all of them, since a signal may end the call."""

    def __init__(self, output: Path | None, document: dict[str, Any]) -> None:
        self._output = output
        self.document = document
        self.failures: list[str] = []
        self._end = float("inf")

    def put(self, name: str, value: Any) -> None:
        self.document[name] = value
        if self._output is not None:
            text = json.dumps(self.document, indent=1) + "\n"
            partial = self._output.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._output)

    def judge(self, what: str, holds: bool) -> None:
        print(f"\n{what}: {'holds' if holds else 'FAILS'}", flush=True)
        if not holds:
            self.failures.append(what)

    @contextmanager
    def part(self, name: str, num_seconds: float) -> Iterator[None]:
        print(f"\n## {name}\n", flush=True)
        start = time.perf_counter()
        self._end = start + num_seconds
        yield
        taken = round(time.perf_counter() - start, 1)
        self.put("seconds", self.document.get("seconds", {}) | {name: taken})

    def has_time(self, for_what: str) -> bool:
        """Whether the part may begin with this; else it is told that it was left out."""
        if time.perf_counter() < self._end:
            return True
        print(f"no time left for {for_what}", flush=True)
        self.put("left_out", [*self.document.get("left_out", []), for_what])
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.toy:
        parser.set_defaults(**_TOY)
        args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ledger = Ledger(args.output, {"schema": SCHEMA_VERSION, "machine": describe_machine(device)})
    for key, value in ledger.document["machine"].items():
        print(f"{key}: {value}", flush=True)
    for name in args.part:
        run, num_seconds = PARTS[name]
        with ledger.part(name, num_seconds if args.seconds is None else args.seconds):
            run(ledger, device, args)
    print("\nFAILED: " + ", ".join(ledger.failures) if ledger.failures else "\nall hold")
    return 1 if ledger.failures else 0


def _part_backends(ledger: Ledger, device: torch.device, args: argparse.Namespace) -> None:
    found = check_backends(device, args.flip_tokens, args.backend, args.tiny)
    print(backend_table(found))
    _judge_each(ledger, "backends", found)


def _part_products(ledger: Ledger, device: torch.device, args: argparse.Namespace) -> None:
    found = _check_products(device, args)
    print(product_table(found))
    _judge_each(ledger, "products", found)


def _judge_each(ledger: Ledger, what: str, found: Sequence[Any]) -> None:
    ledger.put(what, [asdict(each) | {"holds": each.holds} for each in found])
    ledger.judge(what, bool(found) and all(each.holds for each in found))


def _part_texts(ledger: Ledger, device: torch.device, args: argparse.Namespace) -> None:
    exact = _check_texts(device, args)
    print(equality_table(exact))
    ledger.put("fp32_equality", [asdict(result) for result in exact])
    ledger.put("fp32_holds", fp32_holds(exact))
    ledger.judge("equal texts in fp32", fp32_holds(exact))
    found: list[dict[str, Any]] = []
    for name in args.model:
        for determinism in ("exact", "fast"):
            if ledger.has_time(f"texts of {name}, {determinism}"):
                model = _loaded(name, determinism, device, args)
                equality = _compare_model(model, args)
                print(equality_table(equality))
                num_equal = sum(r.num_equal for r in equality)
                share = num_equal / sum(r.num_streams for r in equality)
                told = {"equal_share": share, "equality": [asdict(each) for each in equality]}
                found.append(_told(model) | told)
                ledger.put("texts", found)
                if determinism == "exact":
                    ledger.judge(f"equal texts of {name} under exact", share == 1)


def _part_drafts(ledger: Ledger, device: torch.device, args: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    for name in args.model:
        model = _loaded(name, args.determinism, device, args)
        found.append(_told(model) | {"cells": []})
        contenders: list[Contender] = [EngineContender(GAMMA_0, model.core, PLAIN)]
        for drafter in args.drafter:
            drafting = SpeculativeParams(draft_strategy=drafter)
            contenders.append(EngineContender(drafter, model.core, drafting))
        for workload, size in product(args.workload, args.batch):
            if ledger.has_time(f"{name}: {workload}, {size} at once"):
                cell = Cell(workload, size, SAMPLINGS["greedy"])
                count = -(-args.prompts // size) * size
                prompts = load_prompts(workload, _source(model, args.new_tokens), count)
                jobs = make_jobs(cell, prompts, args.new_tokens)
                report = report_cell(
                    measure_cell(cell, jobs, contenders, args.rounds, lambda _: None)
                )
                print(cell_tables(report, model.what), flush=True)
                found[-1]["cells"].append(to_json(report))
                ledger.put("models", found)


def _part_steps(
    ledger: Ledger,
    device: torch.device,
    args: argparse.Namespace,
    shape: str,
    quantization: Literal["int4"] | None = None,
) -> None:
    """``fast``, ``exact``, then torch's, which has no product of 4 bits: there it is bf16's. The batch
    sizes that ours are asked about most come first, since each is compiled anew."""
    name, shape = f"{shape} {quantization or 'bf16'}", "toy" if args.toy else shape
    bandwidth = copy_bandwidth(device)
    found: dict[str, Any] = {"bandwidth": bandwidth, "steps": [], "accounts": []}
    print(f"copies: {bandwidth / 1e12:.2f} TB/s", flush=True)

    def tell(what: str, step: StepTime) -> None:
        rows, share = f"{what}, {step.num_requests} rows", step.num_bytes / step.seconds / bandwidth
        print(f"{name}, {rows}: {step.seconds * 1e3:.3f} ms, {share:.0%} of copies", flush=True)
        found["steps"].append({"what": what, "share": share} | asdict(step))
        ledger.put(f"steps {name}", found)

    determinisms: Sequence[Determinism] = ("fast", "exact")
    for determinism in determinisms if args.determinism is None else [args.determinism]:
        if ledger.has_time(f"{name}, {determinism}"):
            _own_steps(found, tell, determinism, (shape, quantization), device, args)
            ledger.put(f"steps {name}", found)
    model = None
    for size in sorted(args.batch, key=lambda size: (size not in (1, 32), size)):
        if ledger.has_time(f"{name}, torch, {size} rows"):
            model = model or random_model(shape, device)
            try:
                tell("torch", compiled_step(model, size, args.kv_tokens))
            except Exception as error:  # of any compiler: ends no call
                print(f"torch failed: {error}", flush=True)
                ledger.put(f"steps {name}", found | {"torch_failed": str(error)})


def _own_steps(
    found: dict[str, Any],
    tell: Callable[[str, StepTime], None],
    determinism: Determinism,
    asked: tuple[str, Literal["int4"] | None],
    device: torch.device,
    args: argparse.Namespace,
) -> None:
    shape, quantization = asked
    config = EngineConfig(
        device=str(device),
        determinism=determinism,
        max_num_seqs=max(args.batch),
        num_blocks=(max(args.batch) + 1) * (args.kv_tokens + 128) // EngineConfig().block_size,
        enable_prefix_cache=False,
    )
    model = random_model(shape, device)
    num_bytes = weight_bytes(model)
    try:
        if quantization is not None:
            round_model(model)
        engine = build_engine_for(model, None, config)
    except (ValueError, UnsupportedModelError) as error:
        found["refused"] = str(error)
        print(f"{determinism}: {error}", flush=True)
        return
    core, stored = core_of(engine), engine.info.quantization
    num_bytes = num_bytes if stored is None else int(num_bytes * stored.bits / 16)
    assert isinstance(core.runner, ModelRunner)
    for size in args.batch:
        tell(determinism, own_step(core.runner, size, args.kv_tokens, num_bytes))
    for size in args.batch:
        account = device_account(core, size)
        if account is not None:
            print(f"{determinism}, {size} requests, a step's {account}", flush=True)
            told = {"what": determinism, "num_requests": size} | account._asdict()
            found["accounts"].append(told)


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
    return markdown_table([("backend", "error", "same bits", "flips", ""), *rows], 1)


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
    header = ("product", "same bits", "error", *(f"{count} rows" for count in counts), "")
    return markdown_table([header, *rows], 1)


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
    return markdown_table([("speculation", "drafted", "accepted", "equal streams", ""), *rows], 1)


def _check_products(device: torch.device, args: argparse.Namespace) -> list[ProductResult]:
    """On a CPU the GPU's product runs under its interpreter, at toy sizes alone."""
    if missing_for(device) is not None:
        return []
    if device.type == "cuda" and not args.toy:
        return check_products(device, SHAPES, ROW_COUNTS)
    return check_products(device, TOY_SHAPES, TOY_ROW_COUNTS)


def _check_texts(device: torch.device, args: argparse.Namespace) -> list[EqualityResult]:
    """On every backend that ``fast`` may have, and that computes in fp32."""
    kinds = {"samplings": _TOY_SAMPLINGS} if args.toy else {}
    results = []
    for name in serving_backends(device, args.backend):
        found = check_tiny_models(device, args.new_tokens, name, args.tiny, **kinds)
        results += [replace(each, model=f"{each.model} on {name}") for each in found]
    return results


def _loaded(
    name: str, determinism: Determinism | None, device: torch.device, args: argparse.Namespace
) -> BenchModel:
    config = EngineConfig(
        device=str(device),
        determinism=determinism,
        max_num_seqs=max(args.batch),
        enable_prefix_cache=False,
    )
    model = load_bench_model(name, config, with_transformers=False)
    print(f"\n### {name}: {model.what}, determinism {model.info.determinism}\n", flush=True)
    return model


def _told(model: BenchModel) -> dict[str, Any]:
    info = model.info
    names = ("num_parameters", "dtype", "determinism", "attention_backend", "exact_verified")
    return {"name": model.name, "what": model.what} | {name: getattr(info, name) for name in names}


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


PARTS: Mapping[str, tuple[Callable[[Ledger, torch.device, argparse.Namespace], None], float]] = {
    "backends": (_part_backends, 240),
    "products": (_part_products, 240),
    "8b": (partial(_part_steps, shape="8b"), 400),
    "8b-int4": (partial(_part_steps, shape="8b", quantization="int4"), 300),
    "smollm2": (partial(_part_steps, shape="smollm2"), 400),
    "texts": (_part_texts, 400),
    "drafts": (_part_drafts, 400),
}
"""With the seconds after which each begins nothing more; what it is at takes up to two minutes longer."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--toy", action="store_true", help="small sizes, no model that is loaded")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.set_defaults(tiny=TINY_MODELS)
    parser.add_argument("--seconds", type=float, help="of each part, in place of its own")
    parser.add_argument(
        "--backend", nargs="+", help="default: all that serve; one has to know fp32"
    )
    parser.add_argument("--model", nargs="*", default=[BUNDLED], help="bundled scaled large")
    parser.add_argument("--workload", nargs="+", default=["chat", "edit", "code"])
    parser.add_argument("--drafter", nargs="+", default=["ngram", "suffix", "auto"])
    parser.add_argument("--kv-tokens", type=int, default=1024, help="before each row of a step")
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
