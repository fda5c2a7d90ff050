"""Names of models as Ollama's clients say them, with a tag or without."""

from __future__ import annotations

from collections.abc import Iterable

LATEST = ":latest"


def known_name(name: str | None, served: Iterable[str]) -> str | None:
    """The one of the names served that is meant: a name without a tag has the tag ``latest``, and one on
    the hub may have its host before it. What is none of them stays as it is."""
    if name is None:
        return None
    wanted = tagged(name.removeprefix("hf.co/"))
    return next((each for each in served if tagged(each) in (wanted, tagged(name))), name)


def tagged(name: str) -> str:
    """The name with its tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST
