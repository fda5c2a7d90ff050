"""Checks of what code from outside may get wrong."""

from __future__ import annotations

import signal


def is_interrupt(error: BaseException) -> bool:
    """Returns whether this is the user's Ctrl-C, which ends the program. Where Python leaves that signal
    to others, as servers do, a KeyboardInterrupt is code's own, as a SystemExit always is."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def count_of(value: object, most: int | None = None) -> int:
    """Returns ``value``, if it is an integer from 0 to ``most``. Raises ValueError otherwise; booleans
    and integers of other libraries are none."""
    if type(value) is not int or value < 0 or (most is not None and value > most):
        limit = "" if most is None else f" to {most}"
        raise ValueError(f"{str(value)[:80]!r} is no int from 0{limit}")
    return value
