"""The errors of the client's side, in words for a terminal."""

from __future__ import annotations


class ClientError(Exception):
    """The message says what happened and, where there is one, the way out."""


class RefusedError(ClientError):
    """The server answered with ``status``, an HTTP one other than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_busy(self) -> bool:
        """The server has too much to do; later it may take the same."""
        return self.status == 429


class FlagError(ValueError):
    """Flags or input that no request can be made of; the message names them."""


def missing_library(error: ModuleNotFoundError, extras: dict[str, str]) -> str | None:
    """Returns what to install for a library that is not there; None for a module of our own.

    ``extras`` maps a library's top-level module to the extra that brings it.
    """
    library = (error.name or "").partition(".")[0]
    if library not in extras:
        return None
    return f"this command needs {library}: pip install -e '.[{extras[library]}]'"
