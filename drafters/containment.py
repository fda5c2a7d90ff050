"""Calls of drafters that may fail, since some come from outside.

A drafter that raises, tries to end the program or gives back what it may not costs its request a draft,
never the request or the engine.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class MayFail(Protocol):
    """A drafter's part in one request, with a count of its failures."""

    num_failures: int

    @property
    def name(self) -> str: ...


def guarded(blamed: Sequence[MayFail], call: Callable[..., _Result], *args: Any) -> _Result | None:
    """Returns what ``call`` returns; None where it raises, which counts as a failure of these."""
    try:
        return call(*args)
    except BaseException as error:
        if is_interrupt(error):
            raise
        for each in blamed:
            each.num_failures += 1
        logger.exception("drafter %s failed", blamed[0].name if blamed else "of several requests")
        return None


def succeeds(blamed: Sequence[MayFail], call: Callable[..., object], *args: Any) -> bool:
    """Calls, and returns whether it came back; where it raises, these have failed."""
    done: list[object] = []
    guarded(blamed, lambda: done.append(call(*args)))
    return bool(done)


def counted(
    blamed: Sequence[MayFail],
    most: int | None,
    call: Callable[..., object],
    *args: Any,
    otherwise: int = 0,
) -> int:
    """Returns what ``call`` returns if that is a count up to ``most``; else these have failed, for
    ``otherwise``."""
    found = guarded(blamed, lambda: count_of(call(*args), most))
    return otherwise if found is None else found


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
