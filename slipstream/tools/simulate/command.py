"""``python -m slipstream.tools.simulate``: its subcommands and flags."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from slipstream.client.bench import BenchPrompt, builtin_prompts, read_prompts
from slipstream.client.errors import ClientError, FlagError
from slipstream.client.flags import comma_items
from slipstream.tools.replay.log import Tokenizer
from slipstream.tools.simulate.drafting import MeasuredDrafter
from slipstream.tools.simulate.fleet import Fleet
from slipstream.tools.simulate.live import calibrate as calibration
from slipstream.tools.simulate.live.measure import measure_costs, measure_texts
from slipstream.tools.simulate.live.streams import Address
from slipstream.tools.simulate.policies import speculative_of
from slipstream.tools.simulate.profile import Profile, read_profile, write_profile
from slipstream.tools.simulate.results import Figures, figures, table
from slipstream.tools.simulate.routing import ROUTERS
from slipstream.tools.simulate.studies import STUDIES
from slipstream.tools.simulate.trace import read_trace
from slipstream.tools.simulate.work import Arrivals, Work, poisson

_DESCRIPTION = """Simulate fleets of replicas from what was measured on one: see docs/scale.md.

measure a server for a profile, run fleets of it, or draw the studies of the documentation; calibrate
puts two real replicas of this machine beside their simulation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, with a line that says why, for what cannot be done as asked, and 1 for
    a server that did not answer."""
    chosen = _parser().parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except ClientError as error:
        sys.stderr.write(f"simulate: {error}\n")
        return 2 if isinstance(error, FlagError) else 1
    except (ValueError, OSError) as error:
        sys.stderr.write(f"simulate: {error}\n")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.tools.simulate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_study(commands)
    _add_measure(commands)
    _add_calibrate(commands)
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="simulate fleets: all that the lists combine to")
    parser.set_defaults(run=_run)
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="as measure writes it")
    parser.add_argument("--replicas", type=_numbers, default=[1], help="comma-separated")
    parser.add_argument("--per-machine", type=int, default=1, help="replicas that share a machine")
    parser.add_argument(
        "--policy",
        type=comma_items,
        default=["goodput"],
        help="comma-separated: none, fixed:4, goodput, target_rate (default: goodput)",
    )
    parser.add_argument(
        "--routing",
        type=comma_items,
        default=["least_loaded"],
        help=f"comma-separated, of: {', '.join(ROUTERS)} (default: least_loaded)",
    )
    parser.add_argument(
        "--drafter",
        default=MeasuredDrafter.info.name,
        help="measured: drafts as often right as in the profile; of a trace with texts also a "
        "drafter that works without a model (default: measured)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals, in place of --rate")
    parser.add_argument("--model", help="whose tokenizer reads texts (default: the bundled model)")
    parser.add_argument("--rate", type=float, help="requests per second and replica")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default: 60)")
    parser.add_argument("--tenants", type=int, default=16, help="per replica (default: 16)")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of their shares")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--price", type=float, default=1.0, help="of a replica's hour")
    parser.add_argument(
        "--warm-up", type=float, default=0.0, help="seconds whose requests' times do not count"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _add_study(commands: Any) -> None:
    parser = commands.add_parser("study", help="the studies of docs/scale.md, as pictures and JSON")
    parser.set_defaults(run=_study)
    parser.add_argument("profile", type=Path, metavar="PROFILE")
    parser.add_argument("--out", type=Path, default=Path("docs/scale"), help="folder")
    parser.add_argument(
        "--only", type=comma_items, default=list(STUDIES), help=f"of: {', '.join(STUDIES)}"
    )
    parser.add_argument(
        "--most-replicas", type=int, default=10_000, help="of the largest fleet (default: 10000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of arrivals, of fleets up to 100 (default: 40)"
    )


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="make a profile of a running, idle server")
    parser.set_defaults(run=_measure)
    parser.add_argument("port", type=int)
    parser.add_argument("out", type=Path, metavar="PROFILE")
    parser.add_argument("--host", default="127.0.0.1")
    _add_prompts(parser)
    parser.add_argument("--num-blocks", type=int, default=4096, help="of a simulated engine")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of a simulated engine")


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate", help="compare two real replicas with their simulation"
    )
    parser.set_defaults(run=_calibrate)
    parser.add_argument("--port", type=int, default=8400, help="and the next (default: 8400)")
    parser.add_argument("--loads", type=_floats, default=[0.3, 0.5, 0.7], help="of the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load (default: 60)")
    parser.add_argument("--routing", default="affinity", choices=list(ROUTERS))
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    _add_prompts(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        action="append",
        type=_kind_file,
        default=[],
        metavar="KIND=FILE",
        help='JSON lines with "prompt" or "messages"; repeatable (default: edits and code)',
    )
    parser.add_argument("--num-prompts", type=int, default=16, help="of each file (default: 16)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")


def _run(arguments: argparse.Namespace) -> int:
    profile = read_profile(arguments.profile)
    if (arguments.trace is None) == (arguments.rate is None):
        raise ValueError("needs either --rate or --trace")
    if arguments.trace is None and arguments.drafter != MeasuredDrafter.info.name:
        raise ValueError("--drafter needs the texts of a --trace")
    unknown = set(arguments.routing) - set(ROUTERS)
    if unknown:
        raise ValueError(f"routing {min(unknown)!r}: none of {', '.join(ROUTERS)}")
    rows: list[tuple[str, Figures]] = []
    for num_replicas in arguments.replicas:
        for routing in arguments.routing:
            for policy in arguments.policy:
                fleet = Fleet(
                    profile,
                    num_replicas,
                    speculative_of(policy, arguments.drafter),
                    ROUTERS[routing](num_replicas),
                    arguments.per_machine,
                )
                run = fleet.run(_works(arguments, profile, num_replicas))
                found = figures(run, arguments.price, arguments.warm_up)
                rows.append((f"{policy}, {routing}", found))
    sys.stdout.write(table(rows) + "\n")
    if arguments.json is not None:
        document = [{"run": name, **asdict(each)} for name, each in rows]
        _write_json(arguments.json, document)
    return 0


def _works(arguments: argparse.Namespace, profile: Profile, num_replicas: int) -> Iterable[Work]:
    if arguments.trace is not None:
        load = cache(partial(_load_tokenizer, arguments.model))
        return read_trace(arguments.trace, profile.kinds, load, arguments.seed)
    arrivals = Arrivals(
        arguments.rate * num_replicas,
        arguments.seconds,
        arguments.tenants * num_replicas,
        arguments.zipf,
        arguments.seed,
    )
    return poisson(profile.kinds, arrivals)


def _load_tokenizer(model: str | None) -> Tokenizer:
    # Imported late: torch takes seconds to load, and lengths and token ids need none of it.
    from engine.model.loader import bundled_path, load_tokenizer

    tokenizer: Any = load_tokenizer(model or str(bundled_path("target")))
    return tokenizer  # type: ignore[no-any-return]


def _study(arguments: argparse.Namespace) -> int:
    profile = read_profile(arguments.profile)
    unknown = set(arguments.only) - set(STUDIES)
    if unknown:
        raise ValueError(f"study {min(unknown)!r}: none of {', '.join(STUDIES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        rows = STUDIES[name](
            profile, arguments.out / f"{name}.svg", arguments.most_replicas, arguments.seconds
        )
        sys.stdout.write(f"{table(rows)}\n\n")
        _write_json(
            arguments.out / f"{name}.json", [{"run": each, **asdict(found)} for each, found in rows]
        )
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    prompts = _prompts(arguments)

    async def run() -> Profile:
        address = Address(arguments.port, arguments.host)
        kinds, _ = await measure_texts(address, prompts, arguments.tokens)
        costs = await measure_costs(address)
        engine = EngineConfig(num_blocks=arguments.num_blocks, max_num_seqs=arguments.max_num_seqs)
        return Profile(costs, kinds, engine)

    write_profile(asyncio.run(run()), arguments.out)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    prompts = _prompts(arguments)
    with tempfile.TemporaryDirectory() as logs:
        ports = [arguments.port + index for index in range(calibration.NUM_REPLICAS)]
        profile, found = asyncio.run(
            calibration.calibrate(
                ports,
                prompts,
                arguments.loads,
                arguments.seconds,
                arguments.routing,
                arguments.tokens,
                Path(logs),
            )
        )
    sys.stdout.write(calibration.table(found) + "\n")
    difference, spread = calibration.largest(found)
    sys.stdout.write(f"\nlargest difference: {difference:.1%}; of two measurements: {spread:.1%}\n")
    if arguments.profile is not None:
        write_profile(profile, arguments.profile)
    if arguments.json is not None:
        _write_json(arguments.json, [asdict(each) for each in found])
    return 0


def _prompts(arguments: argparse.Namespace) -> dict[str, list[BenchPrompt]]:
    if arguments.num_prompts < 1 or arguments.tokens < 1:
        raise ValueError("--num-prompts and --tokens must be at least 1")
    if not arguments.prompts:
        both = builtin_prompts()
        return {"edit": both[::2], "code": both[1::2]}
    files = dict(arguments.prompts)
    if len(files) < len(arguments.prompts):
        raise ValueError("--prompts: a kind has two files")
    return {kind: read_prompts(path)[: arguments.num_prompts] for kind, path in files.items()}


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _numbers(text: str) -> list[int]:
    words = comma_items(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1")
    return [int(word) for word in words]


def _floats(text: str) -> list[float]:
    try:
        found = [float(word) for word in comma_items(text)]
    except ValueError:
        found = []
    if not found or not all(0 < each < 2 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of shares above 0")
    return found


def _kind_file(text: str) -> tuple[str, Path]:
    kind, equals, path = text.partition("=")
    if not (kind and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=FILE")
    return kind, Path(path)
