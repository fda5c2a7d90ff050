"""With which status ``slipstream serve`` ends, by who told it how often."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.model.loader import BUNDLED
from engine.tokenizer import load_tokenizer
from worlds.served_command import HANG, serving, until
from worlds.two_ranks import saved_model

pytestmark = pytest.mark.slow
KINDS = {
    "engine apart": (),
    "engine within": ("--no-engine-process",),
    "workers": ("--api-workers", "2"),
}
LONG: dict[str, Any] = {"prompt": [5, 6], "stream": True, "ignore_eos": True, "max_tokens": 200}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some kilobytes, with the bundled one's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    load_tokenizer(str(BUNDLED / "target")).save_pretrained(folder)
    saved_model("llama", folder, vocab_size=4096)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "is_patient"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
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
            if is_patient:
                assert [line for line in lines if line][-1] == "data: [DONE]"
                assert server.process.wait(HANG) == 0
                assert "Traceback" not in server.log.read_text()
            else:
                until(lambda: "draining" in server.log.read_text())
                server.process.send_signal(number)
                assert server.process.wait(HANG) == 128 + number
