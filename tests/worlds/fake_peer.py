"""A peer that needs nothing installed: a worker that counts up from a prompt's last token, ways to
misbehave, and a server that streams the same. Run as a module it is the worker, or with a port the
server."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.peers.place import ROOT, Arm, Peer, PeerUnavailableError, Place, WorkerPlan
from bench.peers.protocol import Ask, Clock, Reply, serve

ENVIRON = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
STEP_SECONDS = 0.001


def text_of(prompt: list[int] | tuple[int, ...], count: int) -> list[int]:
    return [prompt[-1] + at + 1 for at in range(count)]


class FakePeer(Peer):
    """``arms``: options of :class:`FakeRunner`, by name; ``load`` goes to the worker."""

    def __init__(self, name: str, arms: dict[str, dict[str, Any]], **load: Any) -> None:
        self.name = name
        self.what = f"a peer named {name}"
        self._arms = tuple(
            Arm(arm, options, speculates="at_a_time" in options) for arm, options in arms.items()
        )
        self._load = load

    def plans(self, place: Place) -> list[WorkerPlan]:  # noqa: ARG002
        python = Path(sys.executable)
        return [WorkerPlan(self.name, python, "worlds.fake_peer", self._load, self._arms, ENVIRON)]


class FakeServedPeer(Peer):
    """``port``: what the server is told to listen on, or nonsense."""

    def __init__(self, name: str = "served", port: str = "{port}") -> None:
        self.name = name
        self.what = "a peer with a server"
        self._port = port

    def plans(self, place: Place) -> list[WorkerPlan]:  # noqa: ARG002
        python = Path(sys.executable)
        command = [str(python), "-m", "worlds.fake_peer", self._port]
        load = {"command": command, "ready": "/ready", "dialect": "openai"}
        load |= {"body": {"model": "fake"}}
        arms = (
            Arm("served plain (HTTP)", over_http=True),
            Arm("served refused (HTTP)", {"body": {"refuse": True}}, over_http=True),
        )
        return [WorkerPlan(self.name, python, "bench.peers.http_worker", load, arms, ENVIRON)]


class UnavailablePeer(Peer):
    name = "absent"
    what = "a peer that cannot be had"

    def prepare(self, place: Place) -> None:  # noqa: ARG002
        raise PeerUnavailableError("no wheel for this machine")

    def plans(self, place: Place) -> list[WorkerPlan]:  # noqa: ARG002
        raise AssertionError("what cannot be had is not asked for workers")


class FakeRunner:
    """Options: ``at_a_time`` tokens per step; ``missing`` tokens left out; ``fails`` raises;
    ``dies`` ends the process; ``hangs`` never answers."""

    def __init__(self, message: dict[str, Any]) -> None:
        if reason := message.get("refuses"):
            raise ValueError(reason)
        # A library that prints must not be taken for an answer.
        os.write(1, b"loading the model\n")
        self.facts = {"fake": "1.0"}

    def run(self, ask: Ask) -> list[Reply]:
        print("running")  # noqa: T201
        if ask.arm.get("fails"):
            raise RuntimeError("no such kernel")
        if ask.arm.get("dies"):
            sys.stderr.write("segmentation fault, so to speak\n")
            sys.stderr.flush()
            os._exit(3)
        if ask.arm.get("hangs"):
            threading.Event().wait()
        clock, step = Clock(), ask.arm.get("at_a_time", 1)
        replies = [Reply() for _ in ask.prompts]
        count = ask.num_new_tokens - ask.arm.get("missing", 0)
        for start in range(0, count, step):
            time.sleep(STEP_SECONDS)
            for reply, prompt in zip(replies, ask.prompts, strict=True):
                reply.add(clock(), text_of(prompt, count)[start : start + step])
        return replies


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("refuse") or body["model"] != "fake":
            self.send_error(400, "refused")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for token in text_of(body["prompt"], body["max_tokens"]):
            event = {"choices": [{"text": "x", "token_ids": [token]}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        # Usage at the end has no choices, and nothing new.
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
    else:
        serve(FakeRunner)
