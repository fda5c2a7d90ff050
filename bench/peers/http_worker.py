"""A worker whose peer is a server: starts it, and streams from it over loopback HTTP.

``load``: ``command`` to start (``{port}`` in it is a free port), ``ready``, the path that answers 200
once requests may come, ``dialect``, one of ``DIALECTS``, and ``body``, fields of every request.
An arm's ``body`` adds fields. One thread and connection per request; the standard library only, and
cheap, since client and server share the machine.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.peers.protocol import Ask, Clock, Reply, end_with_parent, serve

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.3
_READ_SECONDS = 600.0
_LOG_TAIL = 600
_PREFIX = b"data: "
_DONE = b"[DONE]"


class Dialect(NamedTuple):
    """``fields``: a request's own part of the body. ``tokens``: the token ids in one event."""

    path: str
    fields: Callable[[list[int], Ask, int], dict[str, Any]]
    tokens: Callable[[dict[str, Any]], list[int]]


def _openai_fields(prompt: list[int], ask: Ask, seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": ask.num_new_tokens,
        "temperature": ask.temperature,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _openai_tokens(event: dict[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def _llama_fields(prompt: list[int], ask: Ask, seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": ask.num_new_tokens,
        "temperature": ask.temperature,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
        # As the others sample: temperature and nothing else.
        "samplers": ["temperature"],
    }


def _llama_tokens(event: dict[str, Any]) -> list[int]:
    # The last event of a stream holds nothing new.
    return [] if event.get("stop") else list(event.get("tokens") or ())


DIALECTS = {
    "openai": Dialect("/v1/completions", _openai_fields, _openai_tokens),
    "llama": Dialect("/completion", _llama_fields, _llama_tokens),
}


class HttpRunner:
    """A started server. Raises RuntimeError if it ends before it is ready."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._dialect = DIALECTS[message["dialect"]]
        self._body: Mapping[str, Any] = message.get("body", {})
        self._port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # the server's, as long as it lives
        command = [part.format(port=self._port) for part in message["command"]]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **message.get("environ", {})},
            preexec_fn=end_with_parent,
        )
        self._await_ready(message["ready"])
        self.facts: dict[str, Any] = {"command": " ".join(command), **message.get("facts", {})}

    def run(self, ask: Ask) -> list[Reply]:
        replies = [Reply() for _ in ask.prompts]
        failures: list[Exception] = []
        clock = Clock()

        def stream(at: int) -> None:
            try:
                self._stream(ask, at, clock, replies[at])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=stream, args=(at,)) for at in range(len(replies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return replies

    def _stream(self, ask: Ask, at: int, clock: Clock, reply: Reply) -> None:
        body = {**self._body, **self._dialect.fields(ask.prompts[at], ask, ask.seed + at)}
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_READ_SECONDS)
        try:
            payload = json.dumps({**body, **ask.arm.get("body", {})})
            connection.request(
                "POST", self._dialect.path, payload, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {response.read(500)!r}")
            for line in response:
                if line.startswith(_PREFIX) and not line.startswith(_PREFIX + _DONE):
                    event = json.loads(line[len(_PREFIX) :])
                    if "error" in event:
                        raise RuntimeError(f"the server says: {event['error']}")
                    reply.add(clock(), self._dialect.tokens(event))
        finally:
            connection.close()

    def _await_ready(self, path: str) -> None:
        while self._server.poll() is None:
            connection = http.client.HTTPConnection(_HOST, self._port, timeout=5)
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(
            f"the server ended with status {self._server.returncode}: {self._tail()}"
        )

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        return self._log.read().decode(errors="replace").strip()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(HttpRunner)
