"""A checkpoint in few bits, served: what its card says, and the same text with drafts and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from worlds.client_servers import WAIT_SECONDS
from worlds.engine_servers import engine_served
from worlds.packed_models import FORMATS

NUM_WRITTEN = 24
BODY = {
    "prompt": "hello world 123 hello world 12",
    "max_tokens": NUM_WRITTEN,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@contextmanager
def served(path: Path, **settings: Any) -> Iterator[httpx.Client]:
    config = EngineConfig(
        model=str(path), draft=(str(path),), num_blocks=64, max_num_seqs=4, **settings
    )
    with (
        engine_served(config) as found,
        httpx.Client(base_url=f"{found.url}/v1", timeout=WAIT_SECONDS) as client,
    ):
        yield client


def quantization_of(client: httpx.Client) -> Any:
    (card,) = client.get("/models").json()["data"]
    return card["quantization"]


def written(client: httpx.Client, drafter: str) -> tuple[list[int], int]:
    """Returns the ids of the reply's tokens, and how many of them were drafted."""
    asked: dict[str, Any] = {"draft_strategy": drafter}
    if drafter != "none":
        asked |= {"adaptive_depth": "fixed", "num_speculative_tokens": 4}
    reply = client.post("/completions", json=BODY | {"speculative": asked})
    assert reply.status_code == 200, reply.text
    accepted = reply.json()["usage"]["speculative"]["num_accepted_tokens"]
    return reply.json()["choices"][0]["token_ids"], accepted


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FORMATS["Q4_K_and_Q6_K_tied"](tmp_path_factory.mktemp("packed"))


@pytest.mark.slow
def test_a_file_is_served_in_its_own_bits_and_drafts_change_no_text(path: Path) -> None:
    with served(path) as client:
        said = quantization_of(client)
        assert (said["method"], said["source"], said["head"]) == ("gguf", "checkpoint", True)
        assert 4 < said["bits"] < 7
        assert said["activation_bits"] == 8
        assert sum(said["schemes"].values()) == said["num_quantized"] < said["num_parameters"]
        assert said["num_bytes"] < 2 * path.stat().st_size
        plain, _ = written(client, "none")
        assert len(plain) == NUM_WRITTEN
        for drafter in ("ngram", "suffix", "recycling"):
            assert written(client, drafter)[0] == plain
        drafted, num_accepted = written(client, "small_model")
        assert drafted == plain
        assert num_accepted > NUM_WRITTEN // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "activation_bits"),
    [({"quantize_activations": False}, 32), ({"quantization": "none"}, None)],
)
def test_inputs_or_weights_may_be_floats(
    path: Path, settings: dict[str, Any], activation_bits: int | None
) -> None:
    with served(path, dtype="float32", **settings) as client:
        said = quantization_of(client)
        assert (said and said["activation_bits"]) == activation_bits
        assert written(client, "ngram")[0] == written(client, "none")[0]
