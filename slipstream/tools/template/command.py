"""``slipstream stand-template``: find the static draft tree that suits a model and its texts."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from drafters.tables.prob_tables import NUM_TOKENS_KEPT
from drafters.tables.template import MAX_TEMPLATE_NODES
from slipstream.tools.template.search import FIRST_NODES, search

_DESCRIPTION = """Find the static draft tree of the `stand` drafter for a model and texts like yours.

LOG holds one JSON object per line: "prompt" and "completion", and for completions that this server
drew, so that its noise can be repeated, "seed" and "temperature" (and "top_k", "top_p", "min_p") as
they were sent. Each text is decoded again with a tree of several hundred nodes; those accepted most
often are kept. Serve with --drafter.stand.template FILE."""


def add_template_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand; it explains what it cannot do in one line and exits with status 2."""
    parser = commands.add_parser(
        "stand-template",
        help="find the stand drafter's static tree for your texts",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", metavar="LOG", type=Path, help="JSON lines of texts")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write")
    parser.add_argument("--model", help="folder, GGUF file or hub id; default: the bundled one")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="as for serve")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--nodes", type=int, default=80, help="nodes to keep (default: 80)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level="WARNING")
    # Imported late: torch takes seconds to load, and --help needs none of it.
    import torch

    from engine.config import EngineConfig
    from engine.machine import check_device
    from engine.model.loader import load_model, load_tokenizer
    from engine.names import BUNDLED_MODEL
    from engine.request.errors import EngineError
    from slipstream.tools.template.texts import read_log, replay_texts

    if not 1 <= arguments.nodes <= MAX_TEMPLATE_NODES:
        return _refuse(f"--nodes must be from 1 to {MAX_TEMPLATE_NODES}")
    path = arguments.model or BUNDLED_MODEL
    how = (arguments.revision, arguments.trust_remote_code)
    try:
        check_device(EngineConfig(device=arguments.device).device)
        texts = read_log(arguments.log)
        model = load_model(path, torch.device(arguments.device), "auto", *how)
        tokenizer = load_tokenizer(path, *how)
        rows = replay_texts(model, tokenizer, texts, NUM_TOKENS_KEPT)
        template, per_step = search(rows, arguments.nodes)
        note = f"from {len(texts)} texts for {arguments.model or 'the bundled model'}"
        template.save(arguments.out, note)
    except (EngineError, ValueError, OSError) as error:
        return _refuse(str(error))
    depth = max(map(len, template.paths))
    sys.stdout.write(
        f"{arguments.out}: {len(template)} nodes, {depth} deep; the starting tree of {FIRST_NODES} "
        f"nodes brought {per_step:.2f} tokens per step\n"
    )
    return 0


def _refuse(message: str) -> int:
    sys.stderr.write(f"slipstream: {message}\n")
    return 2
