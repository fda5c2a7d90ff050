"""How all processes of a server log: lines of text, or one JSON object per line, on stderr.

Whatever a log line belongs to, a request above all, is in ``log_fields`` while it is worked on; figures
that only one line has come with it as ``extra={"fields": {...}}``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

log_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039
"""The fields of every line besides its message. Replaced, never changed: tasks inherit it."""

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
logger = logging.getLogger("slipstream")

_CHATTY = {
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
    "uvicorn.error": logging.WARNING,
    # What of these libraries is missing or deprecated is not used here.
    "torchao": logging.ERROR,
    "torch.utils._pytree": logging.ERROR,
}
"""Loggers of libraries with unimportant messages, by the lowest level that is of use."""


def add_log_fields(**fields: Any) -> None:
    """Adds fields to all lines of the task under way, and of tasks that it begins; None adds nothing."""
    given = {name: value for name, value in fields.items() if value is not None}
    log_fields.set({**log_fields.get(), **given})


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """Returns a text without what begins a line, moves the cursor, turns text around or is no text."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextLines(logging.Formatter):
    """A line per record, whatever is in it; exceptions follow, indented, so that none looks like one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"  {escaped(line)}" for line in super().formatException(ei).split("\n"))


class JsonLines(logging.Formatter):
    """``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, ``process``, then the fields, and
    ``exception`` where there is one. All in ASCII: nothing that a client sent can begin a line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        # A field cannot stand for what the line itself says.
        line = {**log_fields.get(), **getattr(record, "fields", {}), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The same in all processes."""

    level: LogLevel = "info"
    format: LogFormat = "text"

    def begin(self) -> None:
        """Log so from here on: warnings and what ends a thread unseen included."""
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if self.format == "json" else TextLines(_TEXT))
        logging.basicConfig(level=self.level.upper(), handlers=[handler])
        if self.level != "debug":
            for name, level in _CHATTY.items():
                logging.getLogger(name).setLevel(max(level, logging.root.level))
        if self.format == "json":
            logging.captureWarnings(True)
            sys.excepthook = _log_crash
            threading.excepthook = _log_thread_crash


def log_through_root(name: str) -> None:
    """Has a library's loggers write as all others do, where it brings handlers of its own."""
    logging.getLogger(name)
    for each, library in logging.root.manager.loggerDict.items():
        if f"{each}.".startswith(f"{name}.") and isinstance(library, logging.Logger):
            library.handlers.clear()
            library.propagate = True


def _log_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logger.critical("the process ends", exc_info=(kind, error, trace))


def _log_thread_crash(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_value is not None and not isinstance(crash.exc_value, SystemExit):
        what = (crash.exc_type, crash.exc_value, crash.exc_traceback)
        logger.critical("a thread has ended", exc_info=what)
