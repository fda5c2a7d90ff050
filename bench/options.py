"""The command line of ``python -m bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bench.contenders import SAMPLINGS
from bench.workloads import DATA, workload_names
from engine.config import Quantization
from engine.request.info import Determinism
from slipstream.client.spec_bench import IDS, Questions

_DESCRIPTION = """\
Measure transformers' generate, transformers with prompt look-up (batch 1, all it allows), and the
engine at gamma 0 and with each drafter, in one process and in turns. Every contender writes the same
number of tokens for the same prompts; end-of-text is ignored and the prefix cache is off
unless asked for. The
engine's core is stepped synchronously: no server and no event loop is in the figures."""
_QUICK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Options:
    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    workloads: tuple[str, ...]
    samplings: tuple[str, ...]
    drafters: tuple[str, ...]
    num_rounds: int
    num_new_tokens: int
    num_prompts: int
    determinism: Determinism | None
    device: str
    dtype: str
    quantization: Literal["int8", "int4", "none"] | None
    num_threads: int | None
    max_num_batched_tokens: int
    with_transformers: bool
    prefix_cache: bool
    steady: bool
    draft: tuple[str, ...]
    prefix_layers: str | None
    quantized: Quantization | None
    data: Path
    output: Path | None

    def to_json(self) -> dict[str, Any]:
        """The settings that shape the figures."""
        settings = asdict(self)
        for key in ("data", "output"):
            del settings[key]
        return settings


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Exits with a message, as argparse does, on arguments that make no sense."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.steady and not args.skip_transformers:
        parser.error("--steady needs --skip-transformers: generate's batches cannot be refilled")
    return Options(
        models=tuple(args.model),
        batch_sizes=tuple(args.batch or ((1, 2) if args.quick else (1, 4, 16))),
        workloads=tuple(args.workload),
        samplings=tuple(args.sampling),
        drafters=tuple(args.drafters),
        num_rounds=args.rounds or (1 if args.quick else 3),
        num_new_tokens=args.new_tokens or (8 if args.quick else 96),
        num_prompts=args.prompts or (2 if args.quick else 4),
        determinism=args.determinism,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=args.threads,
        max_num_batched_tokens=_QUICK_ROWS if args.quick else 1024,
        with_transformers=not args.skip_transformers,
        prefix_cache=args.prefix_cache,
        steady=args.steady,
        draft=tuple(args.draft),
        prefix_layers=args.prefix_layers,
        quantized=args.quantized,
        data=args.data,
        output=args.output,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=_DESCRIPTION)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["bundled"],
        metavar="{bundled,scaled,smollm2,PATH}",
        help="bundled (default); scaled: the same text at the cost of 0.4 B parameters; smollm2; or a "
        "folder or file",
    )
    parser.add_argument("--batch", nargs="+", type=positive, help="batch sizes (1 4 16)")
    parser.add_argument(
        "--workload", nargs="+", choices=workload_names(), default=["code", "edit", "random"]
    )
    parser.add_argument(
        "--sampling", nargs="+", choices=list(SAMPLINGS), default=["greedy", "sampled"]
    )
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["ngram", "nasd_one_level", "nasd"],
        metavar="NAME[xWIDTH][:GAMMA][+OPTION[=VALUE]..]",
        help="drafters under goodput; NAMEx3 drafts trees; NAME:4 always verifies 4 tokens; "
        "stand+share sets an option",
    )
    parser.add_argument("--rounds", type=positive, help="repeats of everything (3)")
    parser.add_argument("--new-tokens", type=positive, help="tokens per prompt (96)")
    parser.add_argument(
        "--prompts", type=positive, help="prompts per cell (4), at least a full batch"
    )
    parser.add_argument("--determinism", choices=["exact", "fast"], help="as the engine's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--quantization",
        choices=["int8", "int4", "none"],
        help="as the engine's; default: of models of ours whatever is fastest, else the checkpoint's",
    )
    parser.add_argument("--threads", type=positive, help="torch's threads, for all contenders")
    parser.add_argument("--skip-transformers", action="store_true", help="measure only the engine")
    parser.add_argument(
        "--prefix-cache",
        action="store_true",
        help="keep prompts between runs, so that next to nothing but decoding is measured",
    )
    parser.add_argument(
        "--steady",
        action="store_true",
        help="let the next prompt follow a finished one, as on a busy server, and time decoding while "
        "the batch is full; with --skip-transformers, which cannot",
    )
    parser.add_argument(
        "--draft",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help="what drafts, as the server's flag; models of ours have the bundled drafts",
    )
    parser.add_argument("--prefix-layers", help="layers for prefix_layers, as the server's flag")
    parser.add_argument("--quantized", choices=get_args(Quantization), help="as the server's flag")
    parser.add_argument(
        "--quick", action="store_true", help="few short runs, to see that everything works"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of the held-out files (bench/data)"
    )
    parser.add_argument("--output", type=Path, help="write all figures as JSON to this file")
    return parser


def add_prompts(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds what ``prompts_of`` reads. ``about``: what a number of prompts is."""
    parser.add_argument(
        "--prompts",
        type=lambda text: positive(text) if text.isdigit() else Path(text),
        metavar="{NUMBER,FILE}",
        help=f"{about}; or a file of questions in Spec-Bench's form, whose categories are workloads then",
    )
    parser.add_argument("--ids", choices=IDS, default="all", help="of a file's questions (all)")
    parser.add_argument("--per-category", type=positive, help="of a file's questions (all)")


def prompts_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[int | None, Questions | None]:
    """How many prompts are wanted, None where that is not said, and a file's questions. Exits with a
    message where a workload is unknown or the file cannot be read."""
    number, questions = args.prompts, None
    if isinstance(number, Path):
        number, questions = None, Questions(number, args.ids, args.per_category)
    try:
        known = workload_names(questions)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--prompts: {error}")
    for name in args.workload or ():
        if name not in known:
            parser.error(f"--workload: {name!r} is none of {', '.join(known)}")
    return number, questions


def positive(text: str) -> int:
    """An argument's type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
