"""The engine's errors.

EngineError
├── UnsupportedModelError   refused at start: the model cannot be served, and why, in one line
├── AdapterError            this adapter cannot be loaded, and why, in one line
├── RequestError            this request cannot be run; ``param`` names the field
│   └── UnknownAdapterError there is no adapter of that name
├── TryLaterError           not now; come back after ``retry_after_seconds``. ``code`` names the limit
│   ├── QueueFullError      too many waiting
│   └── TenantLimitError    the tenant's own limit
├── DeadlineExceededError   the request was not done by its deadline
├── RequestFailedError      an admitted request broke; others go on
├── RanksError              the ranks that share the model cannot compute together any more
└── EngineDeadError         the engine died
    └── ShuttingDownError   it was told to end: nothing is admitted, and what is open ends

All survive pickling: they also come from an engine in another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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


class AdapterError(EngineError):
    pass


class UnknownAdapterError(RequestError):
    def __init__(self, name: str) -> None:
        super().__init__("model", f"no adapter {name!r} is loaded")
        self.args = (name,)

    def __str__(self) -> str:
        return f"no adapter {self.args[0]!r} is loaded"


class TryLaterError(EngineError):
    code: str
    retry_after_seconds: float


class QueueFullError(TryLaterError):
    code = "queue_full"

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(retry_after_seconds)
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return "The engine's queue is full; try again later."


class TenantLimitError(TryLaterError):
    def __init__(self, code: str, message: str, retry_after_seconds: float) -> None:
        super().__init__(code, message, retry_after_seconds)
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return str(self.args[1])


class DeadlineExceededError(EngineError):
    def __init__(self, num_output_tokens: int) -> None:
        super().__init__(num_output_tokens)
        self.num_output_tokens = num_output_tokens

    def __str__(self) -> str:
        return (
            f"The request was not done in its time; {self.num_output_tokens} tokens were written."
        )


class RequestFailedError(EngineError):
    pass


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises RequestFailedError where code in Rust panics: what that raises is no ``Exception``, and
    passes by all that handles errors."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestFailedError(f"it panicked: {error}") from error


class RanksError(EngineError):
    pass


class EngineDeadError(EngineError):
    pass


class ShuttingDownError(EngineDeadError):
    pass
