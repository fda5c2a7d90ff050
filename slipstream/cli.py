"""The ``slipstream`` command. A subcommand is one parser and the function that it names as
``run``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from engine.names import usual_model
from engine.request.errors import EngineError
from server.settings import Flags, Settings, add_flags, load_settings
from server.version import server_version
from slipstream.client.commands import add_client_commands
from slipstream.tools.quantize.command import add_quantize
from slipstream.tools.replay.command import add_replay
from slipstream.tools.template.command import add_template_command

logger = logging.getLogger("slipstream")

_EXAMPLES = """examples:
  slipstream serve
  slipstream serve path/to/model --port 9000 --max-num-seqs 32
  slipstream serve --speculative.draft-strategy ngram --speculative-caps.max-speculative-tokens 12
  SLIPSTREAM_API_KEY=... slipstream serve --config slipstream.yaml

slipstream.yaml:
  max_num_seqs: 32
  speculative: {draft_strategy: ngram, adaptive_depth: goodput, max_speculative_tokens: 12}
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out "(default: None)": where None is the default, the text says what it means."""

    def _expand_help(self, action: argparse.Action) -> str:
        return super()._expand_help(action).replace(" (default: None)", "")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream", description="An LLM inference server in which every request drafts."
    )
    parser.add_argument("--version", action="version", version=f"slipstream {server_version()}")
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    serve = commands.add_parser(
        "serve",
        help="serve a model over OpenAI's API",
        description=(Settings.__doc__ or "").replace("\n    ", "\n"),
        usage="slipstream serve [MODEL] [--flag VALUE ...]",
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    serve.set_defaults(run=partial(_serve, add_flags(serve)))
    add_client_commands(commands)
    add_replay(commands)
    add_quantize(commands)
    add_template_command(commands)
    return parser


def _serve(flags: Flags, parsed: argparse.Namespace) -> int:
    del parsed.run
    try:
        settings = load_settings(flags, parsed)
        config = settings.engine_config()
    except (ValidationError, SettingsError, ValueError) as error:
        return _refuse(_explain(error))
    # Imported late: --help and the client's commands need no web framework.
    from server.serve import serve

    settings.log_options().begin()
    if config.model is None:
        config = replace(config, model=usual_model())
    try:
        serve(settings, config)
    except (EngineError, ValueError, OSError) as error:
        return _refuse(str(error))
    return 0


def _explain(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for finding in error.errors():
        name = ".".join(str(part) for part in finding["loc"]).replace("_", "-")
        lines.append(f"{name}: {finding['msg']}")
    return "\n".join(lines)


def _refuse(message: str) -> int:
    sys.stderr.write(f"slipstream: {message}\n")
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parsed = build_parser().parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
