"""Flags that the client's commands share, and the request that they spell."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from drafters.options import FIXED_POLICY, SpeculativeParams
from slipstream.client.errors import FlagError

DEFAULT_URL = "http://127.0.0.1:8000"
_RESERVED = ("speculative", "prompt", "messages", "stream", "stream_options", "n", "model")
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    (
        "temperature",
        float,
        "0 is greedy (default of complete and chat: 0.2, unless model or server have defaults)",
    ),
    ("top_p", float, "keep the likeliest tokens of this total probability"),
    ("top_k", int, "keep so many of the likeliest tokens"),
    ("min_p", float, "keep tokens at least this likely, relative to the likeliest"),
    ("presence_penalty", float, "lower tokens that occurred"),
    ("frequency_penalty", float, "lower tokens by how often they occurred"),
    ("repetition_penalty", float, "divide the logits of tokens that occurred"),
    ("seed", int, "repeats a sampled text"),
)

_FLAGS = {
    each.metadata["flag"]: each for each in fields(SpeculativeParams) if each.metadata["flag"]
}
"""Options of speculation that have a flag of their own."""


def add_connection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default=os.environ.get("SLIPSTREAM_URL", DEFAULT_URL),
        help=f"address (variable SLIPSTREAM_URL; default: {DEFAULT_URL})",
    )
    group.add_argument(
        "--api-key",
        default=os.environ.get("SLIPSTREAM_API_KEY"),
        help="better given as the variable SLIPSTREAM_API_KEY: others can read flags",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="the model to ask for (default: the one served; elsewhere the first that is listed)",
    )
    group.add_argument(
        "--timeout",
        type=_positive,
        default=300.0,
        metavar="SECONDS",
        help="how long the server may be silent (default: 300)",
    )


def add_request(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Sampling and speculation. ``max_tokens`` None: the server's default."""
    group = parser.add_argument_group("sampling", "What is left out is the server's default.")
    shown = "what the context has room for" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {shown}"
    )
    for name, kind, text in _SAMPLING:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, metavar="X" if kind is float else "N", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    add_field(group)
    speculation = add_speculative(parser)
    speculation.add_argument(
        "--drafter", metavar="NAME", help="who drafts; `slipstream chat` lists them by /drafter"
    )


def add_field(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--field",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="any other field of the request; VALUE is JSON, or else a string",
    )


def add_speculative(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group(
        "speculation", "For Slipstream servers. What is left out is the server's default."
    )
    for flag, each in _FLAGS.items():
        is_number = each.type == "int"
        group.add_argument(
            f"--{flag}",
            type=int if is_number else str,
            metavar="N" if is_number else "NAME",
            help=each.metadata["description"],
        )
    group.add_argument(
        "--option",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="one of the drafter's own options, as max_match=6; may be repeated",
    )
    group.add_argument(
        "--speculative",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="any field of the `speculative` object, as tree_width=3; may be repeated",
    )
    return group


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The request without its prompt. Raises FlagError where two flags give one field."""
    fields: dict[str, Any] = {}
    for name in ("max_tokens", *(name for name, _, _ in _SAMPLING), "stop"):
        value = getattr(arguments, name)
        if value is not None:
            fields[name] = value
    fields = with_fields(fields, arguments)
    speculative = speculative_object(arguments)
    if speculative:
        fields["speculative"] = speculative
    return fields


def with_fields(fields: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """``fields`` and those given by --field. Raises FlagError for one that is there already, and for
    numbers that JSON has not."""
    found = dict(fields)
    for key, value in arguments.field:
        if key in found or key in _RESERVED:
            raise FlagError(f"--field {key}: this field has a flag of its own, or none here")
        found[key] = value
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise FlagError("numbers have to be finite") from error
    return found


def speculative_object(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the object that the flags of speculation spell. Names and values are the server's to check.

    Raises FlagError for a field that is given twice.
    """
    pairs = [("draft_strategy", getattr(arguments, "drafter", None))]
    pairs += [
        (each.name, getattr(arguments, flag.replace("-", "_"))) for flag, each in _FLAGS.items()
    ]
    if arguments.gamma is not None and arguments.policy is None:
        pairs.append(("adaptive_depth", FIXED_POLICY))
    given = [(name, value) for name, value in pairs if value is not None]
    given += [(f"options.{key}", value) for key, value in arguments.option]
    return _nested([*given, *arguments.speculative])


def _nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``options.x`` goes into the object ``options``."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        first, dot, rest = key.partition(".")
        place = found
        if dot:
            place = found.setdefault(first, {})
            if not isinstance(place, dict):
                raise FlagError(f"{key}: {first} is given as a whole already")
        name = rest if dot else first
        if name in place:
            raise FlagError(f"speculative {key} is given twice")
        place[name] = value
    return found


def comma_items(text: str) -> list[str]:
    """Items between commas. Raises ArgumentTypeError where one is empty."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item")
    return found


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
