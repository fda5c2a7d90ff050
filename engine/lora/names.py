"""Names and paths of LoRA adapters, as given in settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.request.errors import AdapterError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")


def parse_adapters(wanted: Sequence[str]) -> dict[str, str]:
    """Returns folders by name, as ``NAME=PATH`` gives them. Raises ValueError."""
    found: dict[str, str] = {}
    for each in wanted:
        name, equals, path = each.partition("=")
        if not equals or not path:
            raise ValueError(f"lora: {each!r} is not NAME=PATH")
        try:
            check_name(name)
        except AdapterError as error:
            raise ValueError(f"lora: {error}") from None
        if name in found:
            raise ValueError(f"lora: there are two adapters of the name {name!r}")
        found[name] = path
    return found


def check_name(name: str) -> None:
    """Raises AdapterError for what no model of an API could be called."""
    if not _NAME.fullmatch(name):
        raise AdapterError(
            f"{name[:128]!r} is no name of an adapter: letters, digits and ._/:@+- make one"
        )
