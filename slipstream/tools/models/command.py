"""``slipstream pull`` and ``slipstream models``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from engine.hub.choice import size
from engine.logs import LogOptions, escaped
from slipstream.tools.models.memory import CONTEXT, PROCESSES

_PULL = """Fetch a model of the hub into huggingface's cache, where `slipstream serve NAME` finds it.

NAME is org/repo, hf.co/org/repo or its address. Where the repository holds GGUF files, :QUANT says which
is meant (org/repo:Q4_K_M, in any case); without it that is Q4_K_M, else the one in the fewest bits from 4
on. What broke off is gone on with at the next start. HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME
mean what they mean for huggingface's own commands."""
_MODELS = f"""List the models in huggingface's cache: what to call them, their size on the disk, and the
memory that it takes to serve one text of {CONTEXT} tokens, or of as many as the model has:
weights, keys and values in 16 bits, and {size(PROCESSES)} for the server itself.

With --recommend, list what is recommended for machines of different sizes instead: worked out from the
models' shapes, since nothing is fetched for it."""


_MEMORY_SPEED = 50.0


def add_model_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both; they explain what they cannot do in one line and exit with status 2."""
    pull = commands.add_parser(
        "pull",
        help="fetch a model of the hub",
        description=_PULL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pull.add_argument("name", metavar="NAME", help="org/repo[:QUANT]")
    pull.add_argument("--revision", help="branch, tag or commit on the hub")
    pull.set_defaults(run=_pull)
    models = commands.add_parser(
        "models",
        help="list the models that are here, or those to recommend",
        description=_MODELS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models.add_argument("--json", action="store_true", help="print an array of objects")
    models.add_argument("--recommend", action="store_true", help="list what is recommended instead")
    models.add_argument(
        "--memory-speed",
        type=float,
        metavar="GB/S",
        help=f"of the machine that --recommend is for (default: {_MEMORY_SPEED:g})",
    )
    models.set_defaults(run=_models)


def _pull(arguments: argparse.Namespace) -> int:
    LogOptions().begin()
    # Imported late: --help needs no HTTP client.
    from engine.hub.fetch import fetch
    from engine.hub.name import called, read_name

    try:
        path = fetch(read_name(arguments.name), arguments.revision)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"{path}\n")
    sys.stderr.write(f"slipstream serve {called(str(path))}\n")
    return 0


def _models(arguments: argparse.Namespace) -> int:
    speed = _MEMORY_SPEED if arguments.memory_speed is None else arguments.memory_speed
    if not speed > 0:
        return _refuse("--memory-speed must be above 0")
    if arguments.recommend:
        from slipstream.tools.models.recommended import table

        rows = table(speed)
    elif arguments.memory_speed is not None:
        return _refuse("--memory-speed is for --recommend")
    else:
        from slipstream.tools.models.cached import cached_models

        rows = [
            {
                "name": each.name,
                "size": size(each.size),
                "memory": "" if each.needs is None else size(each.needs.memory),
                "tokens": "" if each.needs is None else each.needs.num_tokens,
                "per_1000_tokens": "" if each.needs is None else size(each.needs.per_token * 1000),
            }
            for each in cached_models()
        ]
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif rows:
        _write(rows)
    else:
        sys.stderr.write("no models are here: slipstream pull NAME\n")
    return 0


def _write(rows: Sequence[dict[str, Any]]) -> None:
    lines = [[name.replace("_", " ").upper() for name in rows[0]]]
    lines += [[escaped(str(value)) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _refuse(message: str) -> int:
    sys.stderr.write(f"slipstream: {escaped(message)}\n")
    return 2
