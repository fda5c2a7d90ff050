"""What answers at the address: a Slipstream server, or another one of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from client.connection import Connection
from client.errors import ClientError, FlagError, RefusedError

# Statuses that say nothing about which paths a server has.
_NO_ANSWER = (401, 429)
_SERVER_FAULT = 500


@dataclass(frozen=True, slots=True)
class Service:
    """``model``: the name that requests give, None where none is needed. ``catalogue``: what
    ``GET /v1/drafters`` says; None for a server that is not Slipstream."""

    model: str | None
    catalogue: Mapping[str, Any] | None

    @property
    def tells_drafts(self) -> bool:
        """Whether replies can say which of their tokens were drafted."""
        return self.catalogue is not None

    @property
    def drafters(self) -> list[str]:
        """Those that a request may name. Raises FlagError where there is no such choice."""
        return [each["id"] for each in self._known_catalogue()["data"]]

    @property
    def default_drafter(self) -> str:
        """Raises FlagError for a server that is not Slipstream."""
        name: str = self._known_catalogue()["defaults"]["draft_strategy"]
        return name

    def descriptions(self) -> dict[str, str]:
        """By drafter. Raises FlagError for a server that is not Slipstream."""
        return {each["id"]: each["description"] for each in self._known_catalogue()["data"]}

    def body(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A request of these fields that asks for everything the display needs.

        Raises FlagError for a ``speculative`` object where nobody would read it.
        """
        body = dict(fields)
        if self.model is not None:
            body["model"] = self.model
        if self.catalogue is not None:
            body["speculative"] = {"return_drafted": True} | body.get("speculative", {})
        elif "speculative" in body:
            raise FlagError(f"{NOT_SLIPSTREAM}: leave out the flags that say how to draft")
        return body

    def _known_catalogue(self) -> Mapping[str, Any]:
        if self.catalogue is None:
            raise FlagError(f"{NOT_SLIPSTREAM}, so there are no drafters to choose from")
        return self.catalogue


NOT_SLIPSTREAM = "this server is not Slipstream"


async def discover(connection: Connection, model: str | None) -> Service:
    """Ask the server what it is. ``model`` None: the one that Slipstream serves, or the first that
    another server lists. Raises ClientError."""
    catalogue = await _catalogue(connection)
    if model is None and catalogue is None:
        model = await _first_model(connection)
    return Service(model, catalogue)


async def _catalogue(connection: Connection) -> Mapping[str, Any] | None:
    try:
        found = await connection.get("/v1/drafters")
    except RefusedError as error:
        if error.status in _NO_ANSWER or error.status >= _SERVER_FAULT:
            raise
        return None
    is_catalogue = isinstance(found, dict) and {"data", "defaults"} <= set(found)
    return found if is_catalogue else None


async def _first_model(connection: Connection) -> str:
    try:
        name = (await connection.get("/v1/models"))["data"][0]["id"]
    except (RefusedError, KeyError, IndexError, TypeError) as error:
        raise ClientError(
            f"{connection.url} does not list its models: name one by --model, or check --url"
        ) from error
    return str(name)
