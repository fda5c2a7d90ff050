"""A worker whose peer is a server: starts it, and streams from it over loopback HTTP.

``load``: ``command`` to start (``{port}`` in it is a free port), ``ready``, the path that answers 200
once requests may come, ``dialect``, one of ``DIALECTS``, and ``body``, fields of every request;
``salted``: each run is a tenant of its own, for whom nothing was learned before. An arm's ``body`` adds
fields. Client and server share the machine, so the client is ``bench.raw_client``,
at the lowest priority.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from bench.peers.protocol import Ask, Reply, end_with_parent, serve
from bench.raw_client import events, post, read_in_turn

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.3
_NICENESS = 19
_LOG_TAIL = 600
UNKNOWN = -1
"""In place of a token that a server wrote and did not say."""


class Dialect(NamedTuple):
    """``fields``: a request's own part of the body, by its place. ``tokens``: the token ids that one
    event adds to so many."""

    path: str
    fields: Callable[[Ask, int], dict[str, Any]]
    tokens: Callable[[dict[str, Any], int], list[int]]


def _openai_fields(ask: Ask, at: int) -> dict[str, Any]:
    return {
        "prompt": ask.prompts[at],
        "max_tokens": ask.length(at),
        "temperature": ask.temperature,
        "seed": ask.seed + at,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _openai_tokens(event: dict[str, Any], _: int) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def _llama_fields(ask: Ask, at: int) -> dict[str, Any]:
    return {
        "prompt": ask.prompts[at],
        "n_predict": ask.length(at),
        "temperature": ask.temperature,
        "seed": ask.seed + at,
        "stream": True,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
        # As the others sample: temperature and nothing else.
        "samplers": ["temperature"],
    }


def _llama_tokens(event: dict[str, Any], num_before: int) -> list[int]:
    if event.get("stop"):
        # Tokens that end within a character are sent in no event, and counted in the last.
        return [UNKNOWN] * (event["tokens_predicted"] - num_before)
    return list(event.get("tokens") or ())


DIALECTS = {
    "openai": Dialect("/v1/completions", _openai_fields, _openai_tokens),
    "llama": Dialect("/completion", _llama_fields, _llama_tokens),
}


class Server:
    """A started server, ready for requests. ``command``: ``{port}`` in it is a free port; ``ready``: the
    path that answers 200 by then. Raises RuntimeError if it ends before."""

    def __init__(
        self, command: Sequence[str], ready: str, environ: Mapping[str, str] | None = None
    ) -> None:
        port = _free_port()
        self.command = [part.format(port=port) for part in command]
        self.url = f"http://{_HOST}:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # the server's, as long as it lives
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(environ or {})},
            preexec_fn=end_with_parent,
        )
        self._await_ready(port, ready)

    def close(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _await_ready(self, port: int, path: str) -> None:
        while self._process.poll() is None:
            connection = http.client.HTTPConnection(_HOST, port, timeout=5)
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
            f"the server ended with status {self._process.returncode}: {self._tail()}"
        )

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        return self._log.read().decode(errors="replace").strip()


class HttpRunner:
    """Streams from a server of its own."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._dialect = DIALECTS[message["dialect"]]
        self._body: Mapping[str, Any] = message.get("body", {})
        self._is_salted: bool = message.get("salted", False)
        self._num_runs = 0
        self._server = Server(message["command"], message["ready"], message.get("environ"))
        os.nice(_NICENESS)
        self.facts: dict[str, Any] = {
            "command": " ".join(self._server.command),
            **message.get("facts", {}),
        }

    def run(self, ask: Ask) -> list[Reply]:
        self._num_runs += 1
        url = f"{self._server.url}{self._dialect.path}"
        bodies = [json.dumps(self._content(ask, at)).encode() for at in range(len(ask.prompts))]
        start = time.perf_counter()
        senders = [partial(post, url, body) for body in bodies]
        found = read_in_turn(senders, ask.num_running or len(senders))
        replies = []
        for sent, pieces in found:
            reply = Reply(sent=sent - start)
            for came, event in events(pieces):
                reply.add(came - start, self._dialect.tokens(event, len(reply.token_ids)))
                usage = event.get("usage") or {}
                reply.account = usage.get("speculative", reply.account)
            replies.append(reply)
        return replies

    def _content(self, ask: Ask, at: int) -> dict[str, Any]:
        salt = {}
        if self._is_salted:
            lap = ask.laps[at] if ask.laps else 0
            salt = {"cache_salt": f"{self._num_runs}/{lap}"}
        own = self._dialect.fields(ask, at)
        return {**self._body, **own, **salt, **ask.arm.get("body", {})}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(HttpRunner)
