"""Regular expressions out of files from outside, which may be written to match for ever."""

from __future__ import annotations

import re
import reprlib
import time

import regex

_SECONDS = 3.0
_MOST_CHARS = 2000


class Patience:
    """The processor time that patterns which share it may take in all. Other threads go on meanwhile."""

    seconds_left = _SECONDS


class Pattern:
    """Raises ValueError with the reason for what is none. ``around`` has the text's place in it."""

    def __init__(self, text: str, patience: Patience, around: str = "{}") -> None:
        self._text, self._patience = text, patience
        if len(text) > _MOST_CHARS:
            raise ValueError(f"it has more than {_MOST_CHARS} characters")
        try:
            re.compile(text)  # which knows less: that is what files are written for
            self._compiled = regex.compile(around.format(text))
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error

    def match(self, name: str) -> bool:
        """Whether a name begins so. Raises ValueError where that takes too long to find out."""
        begin = time.thread_time()
        try:
            left = max(0.001, self._patience.seconds_left)
            return self._compiled.match(name, timeout=left, concurrent=True) is not None
        except TimeoutError:
            shown = reprlib.repr(self._text)
            raise ValueError(f"the pattern {shown} takes too long to match") from None
        finally:
            self._patience.seconds_left -= time.thread_time() - begin
