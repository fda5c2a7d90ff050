"""``slipstream serve --tensor-parallel-size 2``: the text of the whole model, from two processes that end
together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from engine.model.loader import BUNDLED, load_model
from engine.tokenizer import load_tokenizer
from worlds.engine_apart import has_gone
from worlds.served_command import Server, serving, until

pytestmark = pytest.mark.slow

PROMPT = "def load_table(path):\n    rows = []\n    for"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--tensor-parallel-size", "2", "--dtype", "float32", "--num-threads", "1"]
    flags += ["--drafters", "none", "ngram", "--num-blocks", "64"]
    with serving(tmp_path_factory.mktemp("server"), *flags) as found:
        yield found


def text_of_the_whole_model() -> str:
    tokenizer = load_tokenizer(str(BUNDLED / "target"))
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    model = load_model(str(BUNDLED / "target"), torch.device("cpu"), "float32")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_two_ranks_serve_what_the_whole_model_writes(server: Server, drafter: str) -> None:
    answer = server.client().completions.create(
        model="slipstream-bundled",
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"speculative": {"draft_strategy": drafter}},
    )
    assert answer.choices[0].text == text_of_the_whole_model()


def test_the_models_card_says_how_many_share_it(server: Server) -> None:
    card: dict[str, Any] = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]
    assert card["tensor_parallel_size"] == 2
    assert card["determinism"] == "fast"


def test_all_ranks_end_with_the_server(server: Server) -> None:
    """Last, since nothing is served after it."""
    engine = server.engine_pid()
    (follower,) = server.children(b"engine.process.follower", of=engine)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 128 + signal.SIGTERM
    until(lambda: has_gone(engine) and has_gone(follower))
