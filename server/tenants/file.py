"""The file of API keys: YAML or JSON, a list of tenants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from engine.request.params import Tenant
from server.tenants.terms import Terms

_MOST = 2**31 - 1


class TenantEntry(BaseModel):
    """One tenant of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.\-]{1,64}$",
        description="Letters, digits, dots, dashes and underscores; a label of metrics.",
    )
    key: SecretStr | None = Field(
        default=None, description="The API key, visible ASCII; or `key_sha256`."
    )
    key_sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="The key's SHA-256 in hexadecimal: the file then holds no key.",
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Tenants with the same one share caches; default: nobody does. Requests' own "
        "`cache_salt` divides it further.",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=_MOST, description="Prompts; default: any number."
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        description="Tokens of prompts, charged when they come in, and written, charged as they are "
        "written; default: any number.",
    )
    max_concurrent_requests: int | None = Field(
        default=None, ge=1, le=_MOST, description="Choices at a time, waiting ones included."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        description="Longest output of a choice; it then ends with `length`.",
    )
    priority: int = Field(
        default=0,
        ge=-_MOST,
        le=_MOST,
        description="Added to requests' own `priority`, which must not be below 0; lower runs first.",
    )
    weight: float = Field(
        default=1.0,
        ge=0.001,
        le=1000,
        description="Share of tokens while several tenants of a priority wait.",
    )

    drafters: list[str] | None = Field(
        default=None,
        max_length=256,
        description="Those that requests may name, besides `none`; where the server's default is not "
        "among them, the first is the tenant's. Default: all that the server offers.",
    )

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
        )


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    tenants: list[TenantEntry] = Field(min_length=1)


def read_tenants(path: Path, drafters: Container[str] | None = None) -> dict[bytes, Terms]:
    """Terms by the SHA-256 of the key. ``drafters``: those that are loaded; None: not known yet.

    Raises ValueError with one line that names the file and the field, and quotes nothing of it.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"api-keys-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"api-keys-file {path}: is not UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        # What the parser says would quote the line, and the key in it.
        raise ValueError(f"api-keys-file {path}: neither YAML nor JSON{where}") from None
    try:
        return _by_digest(_Content.model_validate(content).tenants, drafters)
    except ValidationError as error:
        raise ValueError(f"api-keys-file {path}: {_first(error)}") from None
    except ValueError as error:
        raise ValueError(f"api-keys-file {path}: {error}") from None


def _first(error: ValidationError) -> str:
    finding: Any = error.errors(include_input=False)[0]
    field = ".".join(map(str, finding["loc"]))
    known = "no such field" if finding["type"] == "extra_forbidden" else finding["msg"]
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
                raise ValueError(f"{field}.drafters.{at}: no such drafter is loaded")
        try:
            digest = bytes.fromhex(tenant.digest())
        except ValueError as error:
            raise ValueError(f"{field}.{error}") from None
        if digest in found:
            raise ValueError(f"{field}.key: an earlier tenant has this key")
        names.add(tenant.name)
        found[digest] = tenant.terms()
    return found
