"""Bounds on what a chat template, which anyone may have written, takes to render.

A signal counts processor time and ends a rendering: on the event loop one that is not quick, whose body
then goes to a process for bodies. What no signal can interrupt, since one operation of the interpreter
does it, is for those processes from the first, where it ends the process.
"""

from __future__ import annotations

import gc
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from jinja2 import nodes

_QUICK_SECONDS = 0.5  # the first rendering compiles the template
_AGAIN_SECONDS = 0.02
_MOST_NUMBER = 200
_GROWING = frozenset(
    {"replace", "join", "center", "ljust", "rjust", "zfill", "indent", "batch", "slice"}
    | {"round", "format", "expandtabs", "wordwrap", "lipsum", "tojson"}
)
"""Filters, methods and functions that may make much of little, unless their arguments are small."""


class SlowTemplateError(BaseException):
    """No ``Exception``, which filters catch."""


class RenderLimit:
    """This process's limit. ``is_last``: no other process renders what takes longer here. ``may_die``: it
    may be ended because of a rendering. ``most_seconds``: the limit of the last process."""

    is_last = may_die = False
    most_seconds = 5.0

    def run(self, render: Callable[[], str], is_heavy: bool) -> str:
        """Raises SlowTemplateError where it takes too long, or is not for this process."""
        if is_heavy and not self.is_last:
            raise SlowTemplateError
        seconds = self.most_seconds if self.is_last else _QUICK_SECONDS
        if threading.current_thread() is not threading.main_thread():
            return _traced(render, time.perf_counter() + seconds)
        signal.signal(signal.SIGPROF, _expire)
        signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
        if self.may_die:
            most = math.ceil(time.process_time() + 2 * seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        try:
            return _run(render)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            if self.may_die:
                resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)


LIMIT = RenderLimit()


def _run(render: Callable[[], str]) -> str:
    """Without collections of garbage: they are not the template's time, and an exception that a signal
    raises in one is lost."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return render()
    finally:
        if collects:
            gc.enable()


def _expire(number: int, frame: FrameType | None) -> None:
    """Ends what ``_run`` runs, and nothing else, however late it is called."""
    del number
    while frame is not None:
        if frame.f_code is _run.__code__:
            raise SlowTemplateError
        frame = frame.f_back


def _traced(render: Callable[[], str], end: float) -> str:
    """Where signals are not to be had, which are the main thread's: slower, by a look at each line of the
    template and at each call."""

    def look(frame: FrameType, *event: Any) -> Any:
        del event
        if time.perf_counter() > end:
            raise SlowTemplateError
        return look if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        return render()
    finally:
        sys.settrace(before)


def is_heavy(tree: nodes.Template) -> bool:
    """Whether a single operation of the template may take more time or memory than a rendering has."""
    return any(map(_grows, tree.find_all((nodes.BinExpr, nodes.Call, nodes.Filter))))


def _grows(node: Any) -> bool:
    if isinstance(node, nodes.BinExpr):
        writes = isinstance(node, nodes.Mod) and not isinstance(node.left, nodes.Getattr)
        return writes or isinstance(node, nodes.Mul | nodes.Pow)
    by_name = node if isinstance(node, nodes.Filter) else node.node
    called = getattr(by_name, "attr", None) or getattr(by_name, "name", None)
    arguments = (*node.args, *(each.value for each in node.kwargs))
    given = [getattr(each, "value", None) for each in arguments]
    if called == "map" and node.args:
        called, *given = given  # it calls the filter of that name
    is_small = all(isinstance(each, str) or each in range(_MOST_NUMBER) for each in given)
    return (called is None or called in _GROWING) and not is_small
