"""Checks of what code from outside may get wrong."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def is_interrupt(error: BaseException) -> bool:
    """Returns whether this is the user's Ctrl-C, which ends the program. Where Python leaves that signal
    to others, as servers do, a KeyboardInterrupt is code's own, as a SystemExit always is."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError where one of them is no token. ``vocab_size`` 0: nobody knows how many there
    are."""
    if token_ids and (min(token_ids) < 0 or 0 < vocab_size <= max(token_ids)):
        raise ValueError("a proposed token is not in the vocabulary")


def count_of(value: object, most: int | None = None) -> int:
    """``value``, if it is an integer from 0 to ``most``. Raises ValueError otherwise; booleans and
    integers of other libraries are none."""
    if type(value) is not int or value < 0 or (most is not None and value > most):
        limit = "" if most is None else f" to {most}"
        raise ValueError(f"{str(value)[:80]!r} is no int from 0{limit}")
    return value
