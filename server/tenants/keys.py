"""Which keys are known: one for everybody, or those of a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Container
from pathlib import Path

from pydantic import SecretStr

from engine.request.params import Tenant
from server.tenants.file import read_tenants
from server.tenants.terms import Terms

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
NOBODY = Terms(Tenant(), salt="")
"""Whoever has the one key of a server without tenants."""

FindKey = Callable[[bytes], Terms | None]


def keys_of(
    api_key: SecretStr | None, api_keys_file: str | None, drafters: Container[str] | None = None
) -> FindKey | None:
    """What finds the terms for the key that a request came with; None: nobody needs one. ``drafters``:
    those that are loaded, where that is known.

    Raises ValueError where both are given or the file cannot be used.
    """
    if api_keys_file is None:
        if api_key is None:
            return None
        digest = _digest(api_key.get_secret_value().encode("ascii"))
        return lambda key: NOBODY if hmac.compare_digest(_digest(key), digest) else None
    if api_key is not None:
        raise ValueError("api-keys-file: contradicts api-key; put that key into the file")
    return KeysFile(Path(api_keys_file), drafters).find


class KeysFile:
    """Keys of a file. Every process that speaks HTTP has its own, and looks at the file itself, at most
    once a second and only when requests come. A file that cannot be used leaves things as they were, and
    is said in the log. ``clock``: seconds."""

    def __init__(
        self,
        path: Path,
        drafters: Container[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._drafters = drafters
        self._clock = clock
        self._looked = clock()
        self._seen = self._version()
        self._terms = read_tenants(path, drafters)

    def find(self, key: bytes) -> Terms | None:
        if self._clock() - self._looked >= _LOOK_SECONDS:
            self._looked = self._clock()
            self._read_again()
        given, found = _digest(key), None
        # To the end, whoever it is, and by digests: the time tells nothing of the keys.
        for digest, terms in self._terms.items():
            if hmac.compare_digest(digest, given):
                found = terms
        return found

    def _version(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def _read_again(self) -> None:
        version = self._version()
        if version == self._seen:
            return
        self._seen = version
        try:
            self._terms = read_tenants(self._path, self._drafters)
        except ValueError as error:
            logger.warning("%s; the tenants stay as they were", error)
            return
        logger.info("read %d tenants from %s", len(self._terms), self._path)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
