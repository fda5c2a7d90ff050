"""Finds the model that a request names, which may have to be loaded before the request can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

LATEST = ":latest"
DURATION = r"^[+-]?(0|(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+)$"
"""How Go writes a duration."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Wish(NamedTuple):
    """``keep_alive``: seconds; None: it does not say. ``only_unloads``: there is nothing to do but to end
    the model."""

    model: str | None
    keep_alive: float | None = None
    only_unloads: bool = False

    @staticmethod
    def of(model: Any, keep_alive: Any, only_unloads: bool) -> Wish:
        """Returns the wish of fields that nobody has checked: what is wrong is refused later."""
        seconds = None
        with suppress(TypeError, ValueError):
            seconds = None if keep_alive is None else seconds_of(keep_alive)
        return Wish(model if isinstance(model, str) else None, seconds, only_unloads)


def seconds_of(duration: float | str) -> float:
    """Returns the seconds that a model stays loaded: infinity for what is below 0. Raises ValueError."""
    if isinstance(duration, str):
        sign = -1.0 if duration.startswith("-") else 1.0
        if not re.match(DURATION, duration):
            raise ValueError("must be seconds, or a duration as 90s, 5m or 1h30m")
        parts = re.findall(r"(\d+(?:\.\d*)?)(\D+)", duration.lstrip("+-"))
        duration = sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
    return math.inf if duration < 0 else float(duration)


def known_name(name: str | None, served: Iterable[str]) -> str | None:
    """The one of the names served that Ollama's clients mean: a name without a tag has the tag "latest",
    and one on the hub may have its host before it. What is none of them stays as it is."""
    if name is None:
        return None
    wanted = tagged(name.removeprefix("hf.co/"))
    return next((each for each in served if tagged(each) in (wanted, tagged(name))), name)


def tagged(name: str) -> str:
    """The name with its tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST
