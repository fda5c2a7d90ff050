"""With which status ``slipstream serve`` ends, by who told it how often."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from worlds.engine_apart import has_gone
from worlds.served_command import HANG, serving, until

pytestmark = pytest.mark.slow
KINDS = {
    "engine apart": (),
    "engine within": ("--no-engine-process",),
    "workers": ("--api-workers", "2"),
}
LONG: dict[str, Any] = {"prompt": [5, 6], "stream": True, "ignore_eos": True, "max_tokens": 200}


def assert_log_is_short(said: list[str]) -> None:
    running, draining = (
        next(at for at, line in enumerate(said) if what in line)
        for what in ("running on ", "draining")
    )
    assert "loading " in said[0]
    assert running < 10
    # Besides, the line of the request that was let finish, and what libraries say at the end.
    own = [line for line in said[draining:] if re.match(r"\d{4}-\d\d-\d\d ", line)]
    assert len([line for line in own if " slipstream.requests" not in line]) == 2


@pytest.fixture
def hang_ups_are_heard() -> Iterator[None]:
    """Also where these tests run under ``nohup``, whose children ignore them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups_are_heard")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "is_patient"),
    [(signal.SIGTERM, True), (signal.SIGHUP, True), (signal.SIGINT, False)],
)
def test_an_end_in_order_is_a_success_and_one_at_once_is_not(
    tiny: Path, tmp_path: Path, kind: str, is_patient: bool, number: signal.Signals
) -> None:
    flags = (*KINDS[kind], "--dtype", "float32", "--num-threads", "1", "--drafters", "none")
    flags += ("--num-blocks", "64", "--drain-seconds", "3600")
    with serving(tmp_path, *flags, model=str(tiny)) as server:
        until(
            lambda: server.log.read_text().count("running on ") == (2 if kind == "workers" else 1)
        )
        # Some thousand tokens more than can be written between the signals.
        asked = LONG | {"n": 1 if is_patient else 128}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=HANG) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(number)
            if number == signal.SIGHUP:  # as a shell and the kernel do
                server.process.send_signal(number)
            if is_patient:
                engine = () if kind == "engine within" else (server.engine_pid(),)
                *_, last, done = (line for line in lines if line)
                assert ('"finish_reason":"length"' in last, done) == (True, "data: [DONE]")
                assert server.process.wait(HANG) == 0
                assert all(map(has_gone, engine))
                assert "Traceback" not in server.log.read_text()
                if kind == "engine apart":
                    assert_log_is_short(server.log.read_text().splitlines())
            else:
                until(lambda: "draining" in server.log.read_text())
                server.process.send_signal(number)
                assert server.process.wait(HANG) == 128 + number
