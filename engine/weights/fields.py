"""The fields of a ``quantization_config``, which anyone may have written: each is looked at before it is
believed."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from engine.request.errors import UnsupportedModelError
from engine.weights.patterns import Patterns

_MOST_IN_GROUP = 1 << 20
Fits = Callable[[str], bool]
"""Whether a name is one that a pattern means."""


class Fields:
    """A JSON object and where it stands. All methods that read raise UnsupportedModelError, which says
    the field, its value and what is served."""

    def __init__(self, found: Any, where: str) -> None:
        if not isinstance(found, Mapping):
            raise UnsupportedModelError(f"{where} is {reprlib.repr(found)} instead of an object")
        self.found: Mapping[str, Any] = found
        self.where = where
        self._patterns = Patterns()

    def refused(self, key: str, served: str) -> UnsupportedModelError:
        """Returns the error for a field whose value is not served."""
        value = reprlib.repr(self.found.get(key))
        return UnsupportedModelError(f"{self.where} has {key}={value}; served: {served}")

    def has(self, key: str) -> bool:
        """Whether the field is there and says something."""
        return self.found.get(key) is not None

    def first(self, *keys: str) -> str:
        """Returns that of a field's several names which is used, the first one where none is."""
        return next((key for key in keys if self.has(key)), keys[0])

    def integer(self, key: str, served: Collection[int], default: int | None = None) -> int:
        """Returns a whole number, checked against the supported values."""
        value = self.found.get(key)
        value = default if value is None else value
        if type(value) is not int or value not in served:
            raise self.refused(key, ", ".join(str(each) for each in served))
        return value

    def group_size(self, key: str, default: int | None = None) -> int:
        """Returns the number of features in a group, -1: all of a row."""
        value = self.found.get(key)
        value = default if value is None else value
        fits = type(value) is int and (
            value == -1 or (0 < value <= _MOST_IN_GROUP and value % 32 == 0)
        )
        if not fits:
            raise self.refused(key, "multiples of 32, and -1")
        assert isinstance(value, int)
        return value

    def text(self, key: str, served: Collection[str], default: str | None = None) -> str:
        """Returns a word in lower case, checked against the supported values."""
        value = self.found.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value.lower() not in served:
            raise self.refused(key, ", ".join(served))
        return value.lower()

    def flag(self, key: str, default: bool) -> bool:
        """Returns a truth value."""
        value = self.found.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refused(key, "true, false")
        return value

    def names(self, key: str) -> list[str | Fits]:
        """Returns a list of words, empty if the field is absent; entries that begin with "re:" become
        patterns."""
        value = self.found.get(key)
        value = [] if value is None else value
        if not isinstance(value, list | tuple) or any(type(each) is not str for each in value):
            raise self.refused(key, "a list of names")
        return [
            self.pattern(key, each.removeprefix("re:")) if each.startswith("re:") else each
            for each in value
        ]

    def pattern(self, key: str, text: str) -> Fits:
        """Returns a regular expression that the field holds; to call it raises ValueError where matching
        takes too long."""
        try:
            self._patterns.match(text, "")
            return partial(self._patterns.match, text)
        except ValueError as error:
            shown = reprlib.repr(text)
            raise UnsupportedModelError(
                f"{self.where} has {key} with the pattern {shown}, which is none: {error}"
            ) from error

    def nothing(self, *keys: str) -> None:
        """Refuses fields that say something which is not served."""
        for key in keys:
            if self.found.get(key):
                raise self.refused(key, "nothing")
