"""What the Dockerfile says, done in a clean environment: all steps of pip, then the server as the image
and deploy/compose.yaml start it. It installs torch anew, so only TEST_IMAGE=1 runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from worlds.deploy_image import Container, stages

pytestmark = pytest.mark.skipif(
    not os.environ.get("TEST_IMAGE"),
    reason="TEST_IMAGE=1 installs what the image holds: minutes, and gigabytes of disk",
)
STARTED_WITHIN = 300.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Container:
    container = Container(tmp_path_factory.mktemp("image"))
    given = {
        name: os.environ[name] for name in ("TORCH_INDEX", "EXTRAS", "MODELS") if name in os.environ
    }
    container.follow(stages()[0], given)
    return container


def test_pip_is_content_with_what_was_installed(built: Container) -> None:
    assert "No broken requirements" in built.run(["python", "-m", "pip", "check"])


def test_only_what_the_project_needs_is_installed(built: Container) -> None:
    listed = json.loads(built.run(["python", "-m", "pip", "list", "--format", "json"]))
    names = {each["name"].lower() for each in listed}
    assert {"slipstream-llm", "torch", "transformers", "uvicorn"} <= names
    assert not {"pytest", "mypy", "ruff", "grafana-foundation-sdk"} & names


@pytest.fixture(scope="module")
def started(built: Container) -> Iterator[tuple[Container, subprocess.Popen[bytes]]]:
    """The last stage, its filesystem read-only but for the volume: there is no home to write to."""
    container = Container(built.root)
    last = stages()[1]
    container.follow([step for step in last if step[0] in ("ARG", "ENV")], {})
    container.environment["SLIPSTREAM_PORT"] = str(free_port())
    models = Path(container.placed("/models"))
    models.mkdir()
    (entry,) = (json.loads(rest) for word, rest in last if word == "ENTRYPOINT")
    container.folder = models
    log = (built.root / "log").open("wb")
    # Popen looks the program up in its own PATH, not in the one it passes on.
    program = container.placed(f"/opt/slipstream/bin/{entry[0]}")
    with (
        log,
        subprocess.Popen(
            [program, *entry[1:]],
            cwd=models,
            env=container.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        yield container, process
        process.kill()


def test_the_server_starts_serves_and_stops(
    started: tuple[Container, subprocess.Popen[bytes]],
) -> None:
    container, process = started
    (check,) = (
        json.loads(rest.partition("CMD ")[2]) for word, rest in stages()[1] if word == "HEALTHCHECK"
    )
    python = container.placed("/opt/slipstream/bin/python")

    def healthy() -> bool:
        command = [python, *check[1:]]
        return not subprocess.run(
            command, env=container.environment, capture_output=True, check=False
        ).returncode

    deadline = time.monotonic() + STARTED_WITHIN
    while not healthy():
        assert process.poll() is None, (container.root / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(1)
    address = f"http://127.0.0.1:{container.environment['SLIPSTREAM_PORT']}"
    body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 8, "ignore_eos": True})
    request = urllib.request.Request(
        f"{address}/v1/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 8
    (stop,) = (rest for word, rest in stages()[1] if word == "STOPSIGNAL")
    process.send_signal(signal.Signals[stop])
    code, said = process.wait(60), (container.root / "log").read_text()
    # uvicorn ends in order, then raises the signal it got once more.
    assert code in (0, -signal.Signals[stop]), said
    assert "Application shutdown complete" in said
