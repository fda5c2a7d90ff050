"""The command line of ``python -m bench.cells``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.contenders import Sampling
from bench.options import add_prompts, positive, prompts_of
from bench.workloads import DATA, workload_names
from engine.request.info import Determinism
from slipstream.client.spec_bench import SPEC_BENCH, Questions

SAMPLINGS = {
    each.name: each
    for each in (
        Sampling("greedy"),
        Sampling("T0.7", temperature=0.7),
        Sampling("T0.8", temperature=0.8),
        Sampling("T1", temperature=1.0),
    )
}
_USUAL_SAMPLINGS = ("greedy", "T0.7", "T1")
LOADS = ("closed", "steady")
IN_PROCESS, OVER_HTTP = "in-process", "http"
WAYS = (IN_PROCESS, OVER_HTTP)
WORKLOADS = ("chat", "edit", "code", "summary", "agent")
AT_ONCE = (1, 8, 16, 32)
_QUICK_WORKLOADS = ("chat", "edit")
_QUICK_SAMPLINGS = ("greedy", "T1")
_QUICK_AT_ONCE = (1, 8, 16)


@dataclass(frozen=True, slots=True)
class Options:
    """``drafters``: None for the usual ones (``contenders.usual_drafters``). ``seconds``: no round is
    begun that would end later, None: no limit."""

    model: str
    device: str
    determinism: Determinism | None
    quantization: str | None
    draft: tuple[str, ...]
    workloads: tuple[str, ...]
    samplings: tuple[str, ...]
    at_once: tuple[int, ...]
    loads: tuple[str, ...]
    ways: tuple[str, ...]
    drafters: tuple[str, ...] | None
    num_prompts: int
    num_new_tokens: int
    num_rounds: int
    seconds: float | None
    predict_only: bool
    report_only: bool
    questions: Questions | None
    data: Path
    output: Path

    @property
    def weights(self) -> str:
        return self.quantization or "own"

    def least_prompts(self, workload: str) -> int:
        """Returns the fewest prompts of a cell. A file's questions are all asked, however few."""
        return self.num_prompts if workload in workload_names() else 1

    def called(self, workload: str) -> str:
        """A workload's name among results, with the ids that its questions have."""
        if self.questions is None or workload in workload_names():
            return workload
        return f"{workload} ({self.questions.ids} ids)"

    def to_json(self) -> dict[str, Any]:
        """The settings that shape the figures."""
        settings = asdict(self)
        for key in ("data", "output", "seconds", "predict_only", "report_only"):
            del settings[key]
        if self.questions is not None:
            settings["questions"]["file"] = self.questions.file.name
        return settings


def parse_options(arguments: Sequence[str] | None, about: str) -> Options:
    """Exits with a message, as argparse does, on arguments that make no sense."""
    parser = _parser(about)
    args = parser.parse_args(arguments)
    num_prompts, questions = prompts_of(parser, args)
    quick = args.quick
    return Options(
        model=args.model,
        device=args.device,
        determinism=args.determinism,
        quantization=args.quantization,
        draft=tuple(args.draft),
        workloads=tuple(
            args.workload or (SPEC_BENCH if questions else _QUICK_WORKLOADS if quick else WORKLOADS)
        ),
        samplings=tuple(args.sampling or (_QUICK_SAMPLINGS if quick else _USUAL_SAMPLINGS)),
        at_once=tuple(args.at_once or (_QUICK_AT_ONCE if quick else AT_ONCE)),
        loads=tuple(args.load or (LOADS[:1] if quick else LOADS)),
        ways=tuple(args.way or (WAYS[:1] if quick else WAYS)),
        drafters=None if args.drafters is None else tuple(args.drafters),
        num_prompts=num_prompts or (2 if quick else 4),
        num_new_tokens=args.new_tokens or (64 if quick else 128),
        num_rounds=args.rounds or (3 if quick else 5),
        seconds=args.seconds,
        predict_only=args.predict,
        report_only=args.report,
        questions=questions,
        data=args.data,
        output=args.output,
    )


def _parser(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cells", description=about)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2 (default), scaled, bundled, a folder or file"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--determinism",
        choices=["exact", "fast"],
        help="as the engine's; default: exact on a CPU, fast on a GPU",
    )
    parser.add_argument(
        "--quantization",
        choices=["int8", "int4", "none"],
        help="as the engine's; default: the checkpoint's own, of models of ours whatever is fastest",
    )
    parser.add_argument(
        "--draft", nargs="+", default=[], metavar="[NAME=]PATH", help="what drafts, as the server's"
    )
    parser.add_argument("--workload", nargs="+", help=f"{_said(WORKLOADS)}, or a file's groups")
    parser.add_argument(
        "--sampling", nargs="+", choices=list(SAMPLINGS), help=_said(_USUAL_SAMPLINGS)
    )
    parser.add_argument(
        "--at-once", nargs="+", type=positive, help=f"requests at once ({_said(AT_ONCE)})"
    )
    parser.add_argument(
        "--load",
        nargs="+",
        choices=LOADS,
        help="closed: a batch of requests begins at once; steady: each that ends is followed by the "
        "next, and what is timed is the time while so many run (both)",
    )
    parser.add_argument(
        "--way",
        nargs="+",
        choices=WAYS,
        help="in-process: a core stepped by hand; http: streams from a server of its own (both)",
    )
    parser.add_argument(
        "--drafters",
        nargs="+",
        metavar="NAME[:GAMMA][+OPTION=VALUE..]",
        help="as of python -m bench; default: the engine's default, auto, the free ones that gain most, "
        "and what comes for the model",
    )
    add_prompts(parser, "prompts per cell (4), at least a full batch")
    parser.add_argument("--new-tokens", type=positive, help="tokens per prompt (128)")
    parser.add_argument("--rounds", type=positive, help="repeats of everything (5)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="some closed cells of two workloads in-process, shorter and three rounds: about five "
        "minutes on two cores with smollm2",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no round that is expected to end later than so long from now; the same call "
        "again goes on",
    )
    parser.add_argument("--predict", action="store_true", help="say how long it will take, and end")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: tables and picture of what is there"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of the prompts' files (bench/data)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("cells.jsonl"),
        metavar="FILE.jsonl",
        help="results, kept round by round and gone on with; FILE.md and FILE-*.png beside "
        "it (cells.jsonl). One file for one state of the code.",
    )
    return parser


def _said(values: Sequence[Any] | dict[str, Any]) -> str:
    return " ".join(map(str, values))
