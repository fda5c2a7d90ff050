"""One reply, from the request to its account on a screen."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from client.connection import Connection
from client.display import Screen, showing
from client.errors import FlagError
from client.service import Service, discover
from client.stream import Reply


def connect(arguments: Namespace) -> Connection:
    """Raises ClientError for an address or a key that is none."""
    return Connection(arguments.url, arguments.api_key, arguments.timeout)


def find_service(arguments: Namespace) -> Service:
    """Raises ClientError where no server answers, or none that could be talked to."""

    async def ask() -> Service:
        async with connect(arguments) as connection:
            return await discover(connection, arguments.model)

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
