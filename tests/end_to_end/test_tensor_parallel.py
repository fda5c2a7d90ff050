"""``slipstream serve --tensor-parallel-size 2``: the text of the whole model, from two processes that end
together."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine.model.loader import BUNDLED, load_model
from engine.tokenizer import load_tokenizer
from worlds.engine_apart import has_gone
from worlds.served_command import HANG, Server, serving, until

pytestmark = pytest.mark.slow

PROMPT = "def load_table(path):\n    rows = []\n    for"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--tensor-parallel-size", "2", "--dtype", "float32", "--num-threads", "1"]
    flags += ["--drafters", "none,ngram", "--num-blocks", "64"]
    with serving(tmp_path_factory.mktemp("server"), *flags) as found:
        yield found


def written_by_the_whole_model(path: str, prompt: Sequence[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    model = load_model(path, torch.device("cpu"), "float32")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    written: list[int] = out[0, ids.shape[1] :].tolist()
    return written


def text_of_the_whole_model() -> str:
    path = str(BUNDLED / "target")
    tokenizer = load_tokenizer(path)
    written = written_by_the_whole_model(path, tokenizer.encode(PROMPT), NUM_TOKENS)
    text: str = tokenizer.decode(written, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_two_ranks_serve_what_the_whole_model_writes(server: Server, drafter: str) -> None:
    asked: Any = {"model": "slipstream-bundled", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    asked["extra_body"] = {"speculative": {"draft_strategy": drafter}}
    answer = server.client().completions.create(**asked, temperature=0)
    assert answer.choices[0].text == text_of_the_whole_model()


def test_the_models_card_says_how_many_share_it(server: Server) -> None:
    card: dict[str, Any] = httpx.get(f"{server.url}/v1/models", timeout=HANG).json()["data"][0]
    assert card["tensor_parallel_size"] == 2
    assert card["determinism"] == "fast"


def test_all_ranks_end_with_the_server(server: Server) -> None:
    """Last, since nothing is served after it."""
    engine = server.engine_pid()
    (follower,) = server.children(b"engine.process.follower", of=engine)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG) == 0
    until(lambda: has_gone(engine) and has_gone(follower))


# --- launched by another ---


def test_ranks_that_torchrun_launches_serve_and_end_with_it(tiny: Path, tmp_path: Path) -> None:
    """As docs/operations.md tells. A signal to torchrun reaches both ranks; the first lets the other
    go."""
    flags = ["--tensor-parallel-size", "2", "--dtype", "float32", "--num-threads", "1"]
    flags += ["--drafters", "none", "--num-blocks", "64"]
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    prompt = list(range(40, 52))
    with serving(tmp_path, *flags, model=str(tiny), launcher=torchrun) as launched:
        asked: Any = {"model": tiny.name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        asked["extra_body"] = {"return_token_ids": True}
        written: Any = launched.client().completions.create(**asked).choices[0]
        assert written.token_ids == written_by_the_whole_model(str(tiny), prompt, 8)
        ranks = launched.children(b"slipstream.cli")
        (engine,) = (
            pid for rank in ranks for pid in launched.children(b"engine.process.child", rank)
        )
        assert len(ranks) == 2
        launched.process.terminate()
        launched.process.wait(HANG)
        until(lambda: all(map(has_gone, [*ranks, engine])))
    assert "SIGKILL" not in launched.log.read_text(), "a rank had to be killed"
