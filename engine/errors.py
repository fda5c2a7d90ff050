"""The engine's errors.

EngineError
├── UnsupportedModelError   refused at start: the model cannot be served, and why
├── RequestError            this request cannot be run; ``param`` names the field
├── QueueFullError          too many waiting; come back after ``retry_after_seconds``
├── RequestFailedError      an admitted request broke; others go on
└── EngineDeadError         the engine thread died; nothing will be served any more
"""

from __future__ import annotations


class EngineError(Exception):
    pass


class UnsupportedModelError(EngineError):
    pass


class RequestError(EngineError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(EngineError):
    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("The engine's queue is full; try again later.")
        self.retry_after_seconds = retry_after_seconds


class RequestFailedError(EngineError):
    pass


class EngineDeadError(EngineError):
    pass
