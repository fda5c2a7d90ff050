"""The command line of ``python -m bench.peers``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.contenders import Sampling
from bench.options import add_prompts, positive, prompts_of
from bench.peers.gguf_writer import BLOCK_TYPES
from bench.peers.llama_cpp import K_TYPES
from bench.peers.place import DEFAULT
from bench.workloads import DATA
from slipstream.client.spec_bench import SPEC_BENCH, Questions

SAMPLINGS = {"greedy": Sampling("greedy"), "T0.8": Sampling("T0.8", temperature=0.8)}
REFERENCE = "openvino int8 plain"


@dataclass(frozen=True, slots=True)
class Options:
    peers: tuple[str, ...]
    only: tuple[str, ...]
    model: str
    draft_model: str | None
    heads: tuple[str, ...]
    gguf: str | None
    engine: Mapping[str, Any]
    workloads: tuple[str, ...]
    samplings: tuple[str, ...]
    concurrency: tuple[int, ...]
    num_prompts: int
    num_new_tokens: int
    num_rounds: int
    num_threads: int
    reference: str
    run_seconds: float
    own_benches: bool
    prepare_only: bool
    list_only: bool
    cache: Path
    questions: Questions | None
    data: Path
    output: Path | None
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        """The settings that shape the figures."""
        settings = asdict(self)
        for key in ("cache", "data", "output", "prepare_only", "list_only"):
            del settings[key]
        if self.questions is not None:
            settings["questions"]["file"] = self.questions.file.name
        return settings


def parse_options(arguments: Sequence[str] | None, peers: Sequence[str], about: str) -> Options:
    """Exits with a message, as argparse does, on arguments that make no sense."""
    parser = _parser(peers, about)
    args = parser.parse_args(arguments)
    num_prompts, questions = prompts_of(parser, args)
    quick = args.quick
    return Options(
        peers=tuple(args.peers),
        only=tuple(args.only),
        model=args.model,
        draft_model=args.draft_model,
        heads=tuple(args.heads),
        gguf=args.gguf,
        engine=dict(args.engine),
        workloads=tuple(args.workload or (SPEC_BENCH if questions else ("files",))),
        samplings=tuple(args.sampling),
        concurrency=tuple(args.concurrency or ((1, 2) if quick else (1, 4, 8, 16, 32))),
        num_prompts=num_prompts or 1,
        num_new_tokens=args.new_tokens or (8 if quick else 128),
        num_rounds=args.rounds or (1 if quick else 3),
        num_threads=args.threads or len(os.sched_getaffinity(0)),
        reference=args.reference,
        run_seconds=args.run_seconds,
        own_benches=args.own_benches,
        prepare_only=args.prepare_only,
        list_only=args.list,
        cache=args.cache,
        questions=questions,
        data=args.data,
        output=args.output,
        command=shlex.join(["python", "-m", "bench.peers", *(arguments or sys.argv[1:])]),
    )


def setting(text: str) -> tuple[str, Any]:
    """An argument's type: a field of ``EngineConfig`` and its value, as JSON or a bare word."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_model(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds what ``model_files`` takes."""
    parser.add_argument(
        "--model",
        default=default,
        help=f"scaled (0.4 B), bundled, smollm2, a folder or a GGUF file ({default})",
    )
    parser.add_argument(
        "--gguf",
        choices=(*BLOCK_TYPES, *K_TYPES),
        help="make a GGUF file of the model in blocks of this type, and compare on that",
    )


def add_engine(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds settings of this server. ``about``: what they are for."""
    parser.add_argument(
        "--engine", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help=about
    )


def _parser(peers: Sequence[str], about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=about)
    parser.add_argument("--peers", nargs="+", choices=peers, default=list(peers))
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="arms to measure, as 'openvino int8*' '*HTTP*'; --list names them all",
    )
    add_model(parser, default="scaled")
    add_engine(
        parser, "settings of this server that it is also measured with, in arms of their own"
    )
    parser.add_argument("--draft-model", help="folder; of models of ours the bundled draft")
    parser.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help="trained heads that this server drafts with, besides those that come with a model",
    )
    parser.add_argument(
        "--workload", nargs="+", help="of those of python -m bench, and a file's (files)"
    )
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    parser.add_argument(
        "--concurrency", nargs="+", type=positive, help="requests at once (1 4 8 16 32)"
    )
    add_prompts(parser, "prompts per cell (1), rounded up to full batches")
    parser.add_argument("--new-tokens", type=positive, help="tokens per prompt (128)")
    parser.add_argument("--rounds", type=positive, help="repeats of everything (3)")
    parser.add_argument("--threads", type=positive, help="CPU threads of everybody (all)")
    parser.add_argument(
        "--reference", default=REFERENCE, help=f"the arm that ratios are against ({REFERENCE})"
    )
    parser.add_argument(
        "--run-seconds", type=float, default=600.0, help="an arm that takes longer has failed (600)"
    )
    parser.add_argument("--quick", action="store_true", help="few short runs, to see what works")
    parser.add_argument(
        "--own-benches", action="store_true", help="also what peers' own bench programs print"
    )
    parser.add_argument(
        "--prepare-only", action="store_true", help="install and export, measure nothing"
    )
    parser.add_argument("--list", action="store_true", help="name peers and arms, and end")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT, help="environments and models (.peers)"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of the held-out files (bench/data)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="STEM", help="write STEM.json, STEM.md and STEM.png"
    )
    return parser
