"""Regular expressions out of files from outside, which may be written to match for ever."""

from __future__ import annotations

import re
import time

import regex

_MOST_CHARS = 2000


class Patterns:
    """Those of one file, and the processor time that they may take in all, while other threads go on."""

    seconds_left = 3.0

    def match(self, text: str, name: str, around: str = "{}") -> bool:
        """Whether a name begins as a pattern says, which stands at its place in ``around``. Raises
        ValueError with the reason where it is none, or takes too long."""
        if len(text) > _MOST_CHARS:
            raise ValueError(f"it has more than {_MOST_CHARS} characters")
        begin, left = time.thread_time(), max(0.001, self.seconds_left)
        try:
            re.compile(text)  # which knows less: that is what files are written for
            whole = around.format(text)
            return regex.match(whole, name, timeout=left, concurrent=True) is not None
        except (re.error, regex.error, RecursionError, OverflowError, TimeoutError) as error:
            raise ValueError(str(error)) from error
        finally:
            self.seconds_left -= time.thread_time() - begin
