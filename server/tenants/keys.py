"""API keys: one for everybody, or those of a file of tenants, which is read again when it changes. The
file is YAML or JSON, a list of tenants."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from engine.request.params import Tenant
from server.documents import DocumentError, read_document
from server.tenants.terms import Terms

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
NOBODY = Terms(Tenant(), salt="")
"""Whoever has the one key of a server without tenants."""

FindKey = Callable[[bytes], Terms | None]
_MOST = 2**31 - 1
_Count = Annotated[int | None, Field(ge=1, le=_MOST)]


class TenantEntry(BaseModel):
    """One tenant of the file."""

    model_config = ConfigDict(
        extra="forbid", strict=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    """Letters, digits, dots, dashes and underscores; a label of metrics."""
    key: SecretStr | None = None
    """The API key, visible ASCII; or `key_sha256`."""
    key_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """The key's SHA-256 in hexadecimal: the file then holds no key."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Tenants with the same one share caches. Requests' own `cache_salt` divides it further."""
    requests_per_minute: _Count = None
    """Prompts; default: any number."""
    tokens_per_minute: _Count = None
    """Tokens of prompts, charged when they come in, and written, charged as they are written; default:
    any number."""
    max_concurrent_requests: _Count = None
    """Choices at a time, waiting ones included."""
    max_tokens: _Count = None
    """Longest output of a choice; it then ends with `length`."""
    priority: int = Field(default=0, ge=-_MOST, le=_MOST)
    """Added to requests' own `priority`, which must not be below 0; lower runs first."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of tokens while several tenants of a priority wait."""

    drafters: list[str] | None = Field(default=None, max_length=256)
    """Those that requests may name, besides `none`; where the server's default is not among them, the
    first is the tenant's. Default: all that the server offers."""

    adapters: list[str] | None = Field(default=None, max_length=256)
    """Those that requests may name as their model and that lists of models show. Default: all that are
    loaded."""

    def digest(self) -> str:
        """The key's SHA-256. Raises ValueError where there is not exactly one sound key."""
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("key: give either key or key_sha256")
        if self.key is None:
            return str(self.key_sha256)
        text = self.key.get_secret_value()
        if not text or any(not "!" <= char <= "~" for char in text):
            raise ValueError("key: must be one or more visible ASCII characters")
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def terms(self) -> Terms:
        own = self.cache_salt is not None
        return Terms(
            Tenant(
                self.name,
                self.weight,
                self.requests_per_minute,
                self.tokens_per_minute,
                self.max_concurrent_requests,
            ),
            salt=json.dumps(["salt", self.cache_salt] if own else ["tenant", self.name]),
            priority=self.priority,
            max_tokens=self.max_tokens,
            drafters=None if self.drafters is None else tuple(self.drafters),
            adapters=None if self.adapters is None else tuple(self.adapters),
        )


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    tenants: list[TenantEntry] = Field(min_length=1)


def read_tenants(path: Path, drafters: Container[str] | None = None) -> dict[bytes, Terms]:
    """Terms by the SHA-256 of the key. ``drafters``: those that are loaded; None: not known yet.

    Raises ValueError with one line that names the file and the field, and quotes nothing of it.
    """
    try:
        content = read_document(path)
        return _by_digest(_Content.model_validate(content).tenants, drafters)
    except DocumentError as error:
        # In full words it would quote the line, and the key in it.
        fault = f"{error.place}: {error.kind}" if error.place else error.kind
    except ValidationError as error:
        fault = _first(error)
    except ValueError as error:
        fault = str(error)
    raise ValueError(f"api-keys-file {path}: {fault}")


_FAULTS = {"extra_forbidden": "no such field", "model_type": "must be a mapping"}


def _first(error: ValidationError) -> str:
    finding: Any = error.errors(include_input=False)[0]
    field = ".".join(map(str, finding["loc"]))
    known = _FAULTS.get(finding["type"], finding["msg"])
    return f"{field}: {known}" if field else str(known)


def _by_digest(tenants: list[TenantEntry], drafters: Container[str] | None) -> dict[bytes, Terms]:
    found: dict[bytes, Terms] = {}
    names = set()
    for place, tenant in enumerate(tenants):
        field = f"tenants.{place}"
        if tenant.name in names:
            raise ValueError(f"{field}.name: an earlier tenant has this name")
        for at, name in enumerate(tenant.drafters or ()):
            if drafters is not None and name not in drafters:
                raise ValueError(f"{field}.drafters.{at}: there is no such drafter")
        try:
            digest = bytes.fromhex(tenant.digest())
        except ValueError as error:
            raise ValueError(f"{field}.{error}") from None
        if digest in found:
            raise ValueError(f"{field}.key: an earlier tenant has this key")
        names.add(tenant.name)
        found[digest] = tenant.terms()
    return found


def keys_of(
    api_key: SecretStr | None, api_keys_file: str | None, drafters: Container[str] | None = None
) -> FindKey | None:
    """Returns the function that finds the terms for a request's key; None: nobody needs a key.
    ``drafters``: those that are loaded, where that is known.

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
