"""The engine's errors.

EngineError
├── UnsupportedModelError   refused at start: the model cannot be served, and why, in one line
├── RequestError            this request cannot be run; ``param`` names the field
├── QueueFullError          too many waiting; come back after ``retry_after_seconds``
├── RequestFailedError      an admitted request broke; others go on
└── EngineDeadError         the engine died
    └── ShuttingDownError   it was told to end: nothing is admitted, and what is open ends

All survive pickling: they also come from an engine in another process.
"""

from __future__ import annotations


class EngineError(Exception):
    pass


class UnsupportedModelError(EngineError):
    pass


class RequestError(EngineError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message)
        self.param = param

    def __str__(self) -> str:
        return str(self.args[1])


class QueueFullError(EngineError):
    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(retry_after_seconds)
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return "The engine's queue is full; try again later."


class RequestFailedError(EngineError):
    pass


class EngineDeadError(EngineError):
    pass


class ShuttingDownError(EngineDeadError):
    pass
