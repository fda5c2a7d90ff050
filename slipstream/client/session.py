"""The service at the address, a Slipstream server or another one of OpenAI's API, and one reply, from
the request to its account on a screen.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from slipstream.client.connection import Connection
from slipstream.client.display import Screen, showing
from slipstream.client.errors import ClientError, FlagError, RefusedError
from slipstream.client.stream import Reply

# Statuses that say nothing about which paths a server has.
_NO_ANSWER = (401, 429)
_SERVER_FAULT = 500
_NOT_LISTED = (RefusedError, KeyError, IndexError, TypeError)
_WHOLE = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}
_FOCUSED = {"temperature": 0.2}
"""The default instead of full temperature, at which small models write noise."""


@dataclass(frozen=True, slots=True)
class Service:
    """``model``: the name that requests give, None where none is needed. ``catalogue``: what
    ``GET /v1/drafters`` says; None for a server that is not Slipstream. ``usual``: fields of requests
    that do not have them."""

    model: str | None
    catalogue: Mapping[str, Any] | None
    usual: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tells_drafts(self) -> bool:
        """Whether replies can say which of their tokens were drafted."""
        return self.catalogue is not None

    @property
    def drafters(self) -> list[str]:
        """The drafters that a request may name. Raises FlagError where there is no such choice."""
        return [each["id"] for each in self._known_catalogue()["data"]]

    @property
    def default_drafter(self) -> str:
        """Raises FlagError for a server that is not Slipstream."""
        name: str = self._known_catalogue()["defaults"]["draft_strategy"]
        return name

    def descriptions(self) -> dict[str, str]:
        """Returns each drafter's description. Raises FlagError for a server that is not Slipstream."""
        return {each["id"]: each["description"] for each in self._known_catalogue()["data"]}

    def body(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A request of these fields that asks for everything the display needs.

        Raises FlagError for a ``speculative`` object if the server would not read it.
        """
        body = {**self.usual, **fields}
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
    is listed. Raises ClientError."""
    catalogue = await _catalogue(connection, model)
    if model is None and catalogue is None:
        model = await _first_model(connection)
        # Slipstream too, where it serves several, says nothing of a model that is not named.
        catalogue = await _catalogue(connection, model)
    return Service(model, catalogue)


async def _catalogue(connection: Connection, model: str | None) -> Mapping[str, Any] | None:
    named = "" if model is None else f"?model={quote(model, safe='')}"
    try:
        found = await connection.get(f"/v1/drafters{named}")
    except RefusedError as error:
        if error.status in _NO_ANSWER or error.status >= _SERVER_FAULT:
            raise
        return None
    is_catalogue = isinstance(found, dict) and {"data", "defaults"} <= set(found)
    return found if is_catalogue else None


async def _usual_sampling(connection: Connection, model: str | None) -> Mapping[str, Any]:
    """Returns what to ask for where neither the server's operator nor its model has defaults. Another
    server's are its own business."""
    try:
        said = (await _listed(connection, model))["default_sampling_params"]
        is_whole = all(said[name] == value for name, value in _WHOLE.items())
    except _NOT_LISTED:
        return {}
    return _FOCUSED if is_whole else {}


async def _first_model(connection: Connection) -> str:
    return str((await model_card(connection))["id"])


async def model_card(connection: Connection, model: str | None = None) -> Mapping[str, Any]:
    """The card of that model, or of the first that is listed; Slipstream's say by ``created`` when the
    server started. Raises ClientError."""
    try:
        return await _listed(connection, model)
    except _NOT_LISTED as error:
        raise ClientError(
            f"{connection.url} does not list its models: name one by --model, or check --url"
        ) from error


async def _listed(connection: Connection, model: str | None) -> Mapping[str, Any]:
    """The same. Raises ``_NOT_LISTED``, and ClientError."""
    cards = (await connection.get("/v1/models"))["data"]
    found: Mapping[str, Any] = next((each for each in cards if each["id"] == model), cards[0])
    return found


def connect(arguments: Namespace) -> Connection:
    """Raises ClientError for an address or a key that is none."""
    return Connection(arguments.url, arguments.api_key, arguments.timeout)


def find_service(arguments: Namespace) -> Service:
    """Raises ClientError where no server answers, or none that could be talked to."""

    async def ask() -> Service:
        async with connect(arguments) as connection:
            service = await discover(connection, arguments.model)
            return replace(service, usual=await _usual_sampling(connection, service.model))

    return asyncio.run(ask())


def new_reply(service: Service) -> Reply:
    """A reply whose request is sent now."""
    return Reply(time.perf_counter(), service.tells_drafts)


def request_reply(
    arguments: Namespace, path: str, body: Mapping[str, Any], reply: Reply, screen: Screen
) -> None:
    """Fill ``reply`` while showing it. Whatever ends it early leaves in it what had come.

    Raises ClientError and KeyboardInterrupt.
    """

    async def talk() -> None:
        async with connect(arguments) as connection:
            await _receive(connection, path, body, reply, screen)

    asyncio.run(talk())


async def _receive(
    connection: Connection, path: str, body: Mapping[str, Any], reply: Reply, screen: Screen
) -> None:
    with showing(screen, reply):
        async with aclosing(connection.stream(path, body)) as pieces:
            async for piece in pieces:
                reply.add(piece, time.perf_counter())
                screen.show(piece)


def finish(reply: Reply, screen: Screen, as_json: bool) -> None:
    """Print the account, or the whole reply as one line of JSON."""
    screen.account(reply)
    if as_json:
        sys.stdout.write(json.dumps(reply.to_json(), ensure_ascii=False) + "\n")
        sys.stdout.flush()


def read_text(argument: str | None) -> str:
    """The argument; standard input for "-", and for none where no terminal is in its place. Raises
    FlagError for what is not UTF-8 or empty, and where there is nothing to read."""
    if argument is None and sys.stdin.isatty():
        raise FlagError("there is no text: give it as an argument, or through a pipe")
    try:
        text = sys.stdin.read() if argument in (None, "-") else argument
        assert text is not None
        # Bytes that were no UTF-8 come as lone surrogates, which nothing can send on.
        text.encode()
    except UnicodeError as error:
        raise FlagError("the text is not valid UTF-8") from error
    if not text:
        raise FlagError("the text is empty")
    return text
