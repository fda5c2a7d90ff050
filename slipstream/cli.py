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
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import SettingsError

from engine.logs import escaped
from engine.names import usual_model
from engine.request.errors import EngineError
from server.setting_names import all_settings, unknown_flag
from server.settings import Flags, Settings, add_flags, load_settings, settings_of_models
from server.version import server_version
from slipstream.client.commands import add_client_commands
from slipstream.tools.models.command import add_model_commands
from slipstream.tools.quantize.command import add_quantize
from slipstream.tools.replay.command import add_replay
from slipstream.tools.template.command import add_template_command

logger = logging.getLogger("slipstream")

_EXAMPLES = """examples:
  slipstream serve
  slipstream serve path/to/model --port 9000 --max-num-seqs 32
  slipstream serve path/to/one path/to/another --keep-alive 10m
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


class _Parser(argparse.ArgumentParser):
    """Takes flags by their whole names only, since a shortened one may mean another in the next version;
    and says in one line what is wrong."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **more})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        for each in unknown:
            if each.startswith("-"):
                self.error(unknown_flag(each, self._option_string_actions))
        if hasattr(found, "more"):
            # argparse takes positional arguments that stand together alone.
            found.more += unknown
            return found, []
        if unknown:
            self.error(f"one argument too many: {unknown[0]}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (--help lists all flags)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
        usage="slipstream serve [MODEL ...] [--flag VALUE ...]",
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    flags = add_flags(serve)
    serve.add_argument(
        "more", nargs="*", metavar="MODEL", help="further models, loaded when they are asked for"
    )
    serve.set_defaults(run=partial(_serve, flags))
    add_model_commands(commands)
    add_client_commands(commands)
    add_replay(commands)
    add_quantize(commands)
    add_template_command(commands)
    return parser


def _serve(flags: Flags, parsed: argparse.Namespace) -> int:
    more = parsed.more
    del parsed.run, parsed.more
    try:
        settings = load_settings(flags, parsed)
        models = [(each, each.engine_config()) for each in settings_of_models(settings, more or ())]
    except (ValidationError, SettingsError, ValueError) as error:
        return _refuse(_explain(error))
    settings.log_options().begin()
    models = [
        (each, config if config.model else replace(config, model=usual_model()))
        for each, config in models
    ]
    named = ", ".join(config.served_model for _, config in models)
    # Imported late: --help and the client's commands need no web framework.
    from server.serve import serve, serve_several

    try:
        if len(models) > 1 or models[0][0].keep_alive is not None:
            logger.info("slipstream %s: %s, when asked for", server_version(), named)
            serve_several(settings, models)
        else:
            logger.info("slipstream %s: loading %s", server_version(), named)
            serve(*models[0])
    except (EngineError, ValueError, OSError) as error:
        if settings.log_format == "json":
            logger.error("%s", error)
            return 2
        return _refuse(str(error))
    return 0


def _explain(error: Exception) -> str:
    """Returns a line per setting at fault."""
    if not isinstance(error, ValidationError):
        return str(error)
    lines: dict[str, list[str]] = {}
    for finding in error.errors(include_url=False):
        name = ".".join(_field_path(finding["loc"])).replace("_", "-")
        message = finding["msg"].removeprefix("Value error, ")
        found = lines.setdefault(name, [])
        if message not in found:
            found.append(message)
    return "\n".join(
        f"{name}: {'; or '.join(found)}" if name else "; ".join(found)
        for name, found in lines.items()
    )


def _field_path(place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Returns the way to a setting, without what pydantic adds for each type that a value may have."""
    parts = tuple(map(str, place))
    known = {path for path, _ in all_settings(Settings)}
    return next((parts[:end] for end in range(1, len(parts)) if parts[:end] in known), parts)


def _refuse(message: str) -> int:
    for line in message.splitlines():
        sys.stderr.write(f"slipstream: {escaped(line)}\n")
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parsed = build_parser().parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
