"""Engines over files of their own: started again they are warm, and another model's file is not used."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.offload.begin import begin_offload
from engine.offload.identity import weights_digest
from engine.process.threaded import AsyncEngine
from engine.request.events import FinishInfo
from engine.request.params import GenerationRequest, SamplingParams
from worlds.serving import until
from worlds.tiny_models import make_runner, random_ids, tiny_model

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 48,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "drafters": ("none",),
    "check_integrity": True,
    "kv_offload_bytes": 1 << 20,
}
PROMPT = random_ids(1, 45)
CACHED = 44


def engine(path: Path | None, model: PreTrainedModel | None = None, **changes: Any) -> AsyncEngine:
    config = EngineConfig(**SMALL | {"kv_offload_file": path and str(path)} | changes)
    return build_engine_for(model or tiny_model("llama"), None, config)


async def written(
    served: AsyncEngine, before_the_end: Callable[[], bool] = lambda: True
) -> tuple[list[int], int]:
    """Serves the prompt and ends the engine, as a server does. Returns the text, and how much of the
    prompt was found."""
    await served.start()
    found: list[int] = []
    finish: FinishInfo | None = None
    sampling = SamplingParams(6, temperature=0.0, ignore_eos=True)
    async for event in served.generate(GenerationRequest("a", tuple(PROMPT), sampling)):
        found += event.token_ids
        finish = event.finish or finish
    await until(before_the_end)
    await served.stop()
    assert finish is not None
    return found, finish.num_cached_tokens


def served_by(served: AsyncEngine, **more: Any) -> tuple[list[int], int]:
    return asyncio.run(written(served, **more))


@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_an_engine_started_again_with_its_file_is_warm(tmp_path: Path, determinism: str) -> None:
    path = tmp_path / "kv"
    first, num_cached = served_by(engine(path, determinism=determinism))
    assert num_cached == 0
    assert served_by(engine(path, determinism=determinism)) == (first, CACHED)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba"])
def test_states_are_found_again_in_a_file_of_their_own(tmp_path: Path, kind: str) -> None:
    path, model = tmp_path / "kv", tiny_model
    first, num_cached = served_by(engine(path, model(kind)))
    assert num_cached == 0
    assert served_by(engine(path, model(kind))) == (first, CACHED)
    (tmp_path / "kv.states").unlink()
    # Without states its blocks are of no use.
    assert served_by(engine(path, model(kind))) == (first, 0)
    assert served_by(engine(path, model(kind))) == (first, CACHED)


def test_evicted_states_come_back_from_memory() -> None:
    """Blocks and slots for one text at a time: a second text takes the first one's places."""

    async def texts(served: AsyncEngine) -> tuple[list[int], list[int]]:
        await served.start()
        found, cached = [], []
        for prompt in (PROMPT, random_ids(2, 45), random_ids(3, 45), PROMPT):
            sampling = SamplingParams(6, temperature=0.0, ignore_eos=True)
            async for event in served.generate(GenerationRequest("a", tuple(prompt), sampling)):
                found += event.token_ids
                cached += [event.finish.num_cached_tokens] if event.finish else []
        await served.stop()
        return found, cached

    small = engine(None, tiny_model("qwen3_5_text"), num_blocks=14, max_num_seqs=1)
    found, cached = asyncio.run(texts(small))
    assert found[-6:] == found[:6]
    assert cached == [0, 0, 0, CACHED]


def test_idle_it_has_copied_all_before_it_ends(tmp_path: Path) -> None:
    """So that a server that is killed has lost nothing that was cached."""
    served = engine(tmp_path / "kv")
    tier = served.core.pool.tier
    assert tier is not None
    num_full = (len(PROMPT) + 6 - 1) // 4
    served_by(served, before_the_end=lambda: len(tier) == num_full)


def test_without_a_file_memory_keeps_what_is_evicted() -> None:
    served = engine(None, num_blocks=14)
    assert served.core.pool.tier is not None
    assert served.core.pool.tier.slots.num_slots > 100
    served_by(served)


def other_weights() -> PreTrainedModel:
    """One number of one matrix differs, by a little."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[7, 5] += 1e-3
    return model


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": other_weights}, "weights"),
        ({"block_size": 8}, "rows"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "sdpa", "determinism": "fast"}, "rows"),
        ({"determinism": "fast"}, "determinism"),
        ({"attention_backend": "sdpa", "determinism": "fast"}, "attention"),
        ({"kv_offload_bytes": 2 << 20}, "num_slots"),
    ],
)
def test_a_file_of_something_else_is_emptied_with_a_word(
    tmp_path: Path, changes: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    served_by(engine(path))
    make = changes.pop("model", None)
    caplog.clear()
    _, num_cached = served_by(engine(path, make and make(), **changes))
    assert num_cached == 0
    words = [each.message for each in caplog.records if "is emptied" in each.message]
    assert len(words) == 1
    assert named in words[0]


def test_every_byte_of_the_weights_counts_and_nothing_else() -> None:
    digest = weights_digest(tiny_model("llama"))
    assert weights_digest(tiny_model("llama")) == digest
    assert weights_digest(other_weights()) != digest
    swapped = tiny_model("llama")
    with torch.no_grad():
        weight = swapped.model.layers[1].mlp.up_proj.weight
        weight[[3, 4]] = weight[[4, 3]].clone()
    assert weights_digest(swapped) != digest
    assert weights_digest(tiny_model("llama").bfloat16()) != digest


def test_what_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_offload_bytes: 5000 has no room for a block of"):
        engine(tmp_path / "kv", kv_offload_bytes=5000)
    with pytest.raises(ValueError, match="No such file"):
        engine(tmp_path / "missing" / "kv")
    (tmp_path / "text").write_text("mine" * 5000)
    with pytest.raises(ValueError, match="is not a file of KV blocks"):
        engine(tmp_path / "text")
    first = engine(tmp_path / "kv")
    with pytest.raises(ValueError, match="in use by another server"):
        engine(tmp_path / "kv")
    first.core.close()


def test_damage_never_keeps_an_engine_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    text, _ = served_by(engine(path))
    size = path.stat().st_size
    for place, length in ((0, 3), (4096, 200), (size // 3, size // 3), (size - 4000, 100)):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(os.urandom(length))
        caplog.set_level(logging.INFO)
        assert served_by(engine(path))[0] == text
    os.truncate(path, size // 2)
    assert served_by(engine(path))[0] == text
    assert served_by(engine(path)) == (text, CACHED)


def test_a_model_of_many_layers_has_a_file(tmp_path: Path) -> None:
    """The header has room for what identifies the rows, however many layers they are of."""
    runner = make_runner(tiny_model("llama", num_hidden_layers=80), exact=True)
    config = EngineConfig(kv_offload_bytes=8 << 20, kv_offload_file=str(tmp_path / "kv"))
    offload = begin_offload(config, runner, {}, "0" * 64, "exact", {})
    assert offload.blocks is not None
    offload.blocks.close()
