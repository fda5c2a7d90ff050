"""``slipstream replay``: its flags, and what they start."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from drafters.base import Drafter, DrafterContext
from drafters.registry import DrafterPluginError, drafter_names, find_plugins
from slipstream.client.flags import comma_items
from slipstream.tools.replay.cost import StepCost, read_step_cost
from slipstream.tools.replay.log import Tokenizer, read_log
from slipstream.tools.replay.replay import (
    CHAIN,
    TREE,
    ReplayCase,
    ReplayResult,
    build_replayable,
    replay,
)
from slipstream.tools.replay.report import SCHEMA_VERSION, check_plot, plot, table, to_json

MAX_BUDGET = 1024
Build: TypeAlias = Callable[[str], Drafter]

_DESCRIPTION = """Replay a log of prompts and completions through drafters, without running a model,
and tell how many tokens per step each would have yielded.

LOG has one JSON object per line: {"prompt": ..., "completion": ...}, texts or lists of token ids;
"messages" in place of "prompt" goes through the model's chat template; "cache_salt" names a tenant.
A draft is accepted where it equals the completion, as in serving. See docs/replay.md.
"""
_EXAMPLES = """examples:
  slipstream replay requests.jsonl
  slipstream replay requests.jsonl --drafters suffix,ngram --budgets 4,8,16,32 --shapes chain,tree
  slipstream replay requests.jsonl --step-cost measured.json --json out.json --plot out.png
"""


def add_replay(commands: Any) -> None:
    """Add the subcommand to ``commands``, what ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser(
        "replay",
        help="replay logged texts through drafters, without a model",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("log", metavar="LOG", type=Path, help="JSON lines")
    parser.add_argument("--model", help="whose tokenizer reads texts (default: the bundled model)")
    parser.add_argument(
        "--drafters",
        type=_names,
        default=["ngram", "suffix"],
        help=f"comma-separated, of: {', '.join(drafter_names())}, and installed plugins "
        "(default: ngram,suffix)",
    )
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=[4, 8, 16, 32],
        help="draft nodes per step, comma-separated (default: 4,8,16,32)",
    )
    parser.add_argument("--shapes", type=_shapes, default=[CHAIN, TREE], help="default: chain,tree")
    parser.add_argument(
        "--tree-width", type=_width, default=4, help="children per node of a tree (default: 4)"
    )
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="start every line with a fresh drafter: nothing is learned from the lines before",
    )
    parser.add_argument(
        "--ignore-fields",
        type=comma_items,
        default=[],
        metavar="NAME,...",
        help="fields of the log that are not to be read",
    )
    parser.add_argument(
        "--step-cost",
        type=Path,
        metavar="FILE",
        help="JSON list of [rows, seconds] of the target's step, for the estimated speed-up "
        "(default: a memory-bound model, 20 ms for 1 row and 24 ms for 33)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 2, with a line that says why, for what cannot be replayed."""
    try:
        if arguments.plot is not None:
            check_plot()
        step_cost = StepCost()
        if arguments.step_cost is not None:
            step_cost = read_step_cost(arguments.step_cost)
        load = cache(partial(_load_tokenizer, arguments.model))
        context = DrafterContext(
            encode=lambda text: load().encode(text, add_special_tokens=False, verbose=False)
        )
        build = partial(build_replayable, context=context)
        cases = _cases(arguments, build)
        lines = read_log(arguments.log, load, arguments.ignore_fields)
        results = []
        with _progress(len(cases) * len(lines)) as advance:
            for case in cases:
                results.append(
                    replay(case, lines, step_cost, arguments.isolate, advance, build=build)
                )
        _write(arguments, results, len(lines), step_cost, build)
    except ImportError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return _refuse("--plot needs matplotlib: pip install -e '.[plot]'")
    except (ValueError, OSError) as error:
        return _refuse(str(error))
    return 0


def _cases(arguments: argparse.Namespace, build: Build) -> list[ReplayCase]:
    """Every drafter, shape and budget, checked before anything runs. Drafters that have no trees to
    offer are replayed as chains only."""
    cases = []
    for name in arguments.drafters:
        info = build(name).info
        shapes = [shape for shape in arguments.shapes if shape == CHAIN or info.drafts_trees]
        if not shapes:
            raise ValueError(f"drafter {name!r} has no trees to offer: --shapes chain")
        for shape in shapes:
            width = 1 if shape == CHAIN else arguments.tree_width
            cases += [ReplayCase(name, width, budget) for budget in arguments.budgets]
    return cases


def _load_tokenizer(model: str | None) -> Tokenizer:
    # Imported late: torch takes seconds to load, and token ids need none of it.
    from engine.model.loader import bundled_path, load_tokenizer

    tokenizer: Any = load_tokenizer(model or str(bundled_path("target")))
    return tokenizer  # type: ignore[no-any-return]


def _write(
    arguments: argparse.Namespace,
    results: list[ReplayResult],
    num_lines: int,
    step_cost: StepCost,
    build: Build,
) -> None:
    sys.stdout.write(table(results) + "\n")
    names = [name for name in arguments.drafters if _wants_more_than_a_log(build(name))]
    if names:
        sys.stdout.write(
            f"\n{', '.join(names)}: learns from the target's likeliest tokens; a log knows only the "
            "one that was written, so serving does better than this.\n"
        )
    if arguments.json is not None:
        document = {
            "schema": SCHEMA_VERSION,
            "log": str(arguments.log),
            "num_lines": num_lines,
            "isolate": arguments.isolate,
            "step_cost": step_cost.measured,
            "results": [to_json(result) for result in results],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot(results, arguments.plot)


def _wants_more_than_a_log(drafter: Drafter) -> bool:
    drafter.open("probe", [0], {}, "")
    return drafter.num_top_tokens("probe") > 0


@contextmanager
def _progress(num_replays: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, where someone watches and tqdm is installed."""
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=num_replays, unit="replay", disable=not sys.stderr.isatty()) as bar:
        yield bar.update


def _names(text: str) -> list[str]:
    names = comma_items(text)
    unknown = set(names) - set(drafter_names())
    known = (*drafter_names(), *_plugin_names()) if unknown else ()
    for name in names:
        if name in unknown and name not in known:
            raise argparse.ArgumentTypeError(f"unknown drafter {name!r}; known: {', '.join(known)}")
    return names


def _plugin_names() -> tuple[str, ...]:
    try:
        return tuple(find_plugins())
    except DrafterPluginError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shapes(text: str) -> list[str]:
    shapes = comma_items(text)
    for shape in shapes:
        if shape not in (CHAIN, TREE):
            raise argparse.ArgumentTypeError(f"unknown shape {shape!r}; known: {CHAIN}, {TREE}")
    return shapes


def _number(text: str, minimum: int, maximum: int) -> int:
    if not text.isdecimal() or not minimum <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {minimum} to {maximum}")
    return int(text)


def _budgets(text: str) -> list[int]:
    return [_number(word, 1, MAX_BUDGET) for word in comma_items(text)]


def _width(text: str) -> int:
    return _number(text, 2, 64)


def _refuse(message: str) -> int:
    sys.stderr.write(f"slipstream: {message}\n")
    return 2
