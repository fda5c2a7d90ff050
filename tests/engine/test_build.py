"""Building: what an engine's sizes follow from, and that engines do not meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from drafters.base import DrafterNeeds, DraftRequest
from drafters.tree import DraftTree, chain
from engine import machine
from engine.build import build_engine, build_engine_for
from engine.build import sizes as build_sizes
from engine.config import EngineConfig
from engine.hub import memory
from engine.machine import can_pack
from engine.model.layers import PackedLinear
from engine.model.linear import OneDnnWeight
from engine.process.threaded import AsyncEngine
from engine.request.errors import UnsupportedModelError
from engine.request.params import GenerationRequest, SamplingParams
from worlds.engine_driver import ORACLE, OracleDrafter, register_oracle, write_all
from worlds.tiny_models import CPU, VOCAB_SIZE, greedy_text, random_ids, reference_model, tiny_model

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 48,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "check_integrity": True,
}
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dimensions, float32


def build_tiny(name: str = "llama", **changes: Any) -> AsyncEngine:
    return build_engine_for(tiny_model(name), None, EngineConfig(**SMALL | changes))


def written_with_and_without_drafts(
    plain: AsyncEngine, drafting: Callable[[], AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts of an engine without drafts, and of one of the same model whose drafts are mostly right."""
    prompts = [random_ids(1, 11), random_ids(2, 30), random_ids(3, 5)]
    expected, _ = write_all(plain, prompts, 20)
    texts = [prompt + written for prompt, written in zip(prompts, expected, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    written, num_accepted = write_all(drafting(), prompts, 20, ORACLE)
    assert num_accepted > 30
    return expected, written


# --- sizes ---


@pytest.mark.parametrize(
    ("free", "fraction", "num_blocks"),
    [
        (100 * 4 * BYTES_PER_TOKEN, 0.5, 50),
        (100 * 4 * BYTES_PER_TOKEN + 9, 0.25, 25),
        # More than every seat's longest request needs: 4 seats of 256 tokens.
        (1 << 40, 0.5, 4 * 256 // 4),
        (0, 0.5, 1),
    ],
)
def test_the_pool_takes_its_share_of_free_memory_and_no_more_than_is_of_use(
    monkeypatch: pytest.MonkeyPatch, free: int, fraction: float, num_blocks: int
) -> None:
    asked: list[torch.device] = []

    def free_bytes(device: torch.device) -> int:
        asked.append(device)
        return free

    monkeypatch.setattr(build_sizes, "free_bytes", free_bytes)
    engine = build_tiny(num_blocks=None, kv_memory_fraction=fraction)
    assert engine.info.num_blocks == num_blocks
    assert engine.info.block_size == 4
    assert engine.info.max_model_len == min(256, 4 * num_blocks)
    assert asked == [CPU]


def test_free_memory_is_what_the_machine_and_the_container_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 0 < machine.free_bytes(CPU) < 1 << 50
    for available, left in ((5, 9), (9, 5)):
        monkeypatch.setattr(memory, "_available", lambda available=available: available)
        monkeypatch.setattr(memory, "_cgroup_left", lambda _, left=left: left)
        assert machine.free_bytes(CPU) == 5


@pytest.mark.parametrize(
    ("name", "wanted", "num_blocks", "max_model_len"),
    [
        ("llama", None, 80, 256),
        ("llama", 100, 80, 100),
        ("llama", None, 10, 40),
        ("llama", 50, 10, 40),
        # Rotary embeddings that follow the longest row cap the length.
        ("phi3_longrope", None, 80, 64),
    ],
)
def test_requests_may_grow_as_far_as_model_settings_and_pool_allow(
    name: str, wanted: int | None, num_blocks: int, max_model_len: int
) -> None:
    engine = build_tiny(name, max_model_len=wanted, num_blocks=num_blocks)
    assert engine.info.max_model_len == max_model_len


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_that_others_are_to_read_has_the_rights_of_a_new_one(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        save_file({"a": torch.zeros(2)}, tmp_path / "weights")
        machine.let_others_read(tmp_path / "weights")
        (tmp_path / "new").touch()
    finally:
        os.umask(before)
    rights = {(tmp_path / name).stat().st_mode for name in ("weights", "new")}
    assert len(rights) == 1


@pytest.mark.parametrize(("name", "most"), [("llama", 256), ("phi3_longrope", 64)])
def test_a_length_beyond_the_models_is_refused(name: str, most: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"max_model_len is {most + 1}, .* {most} tok"):
        build_tiny(name, max_model_len=most + 1, num_blocks=80)


def test_a_length_that_the_blocks_cut_is_told(caplog: pytest.LogCaptureFixture) -> None:
    build_tiny(max_model_len=50, num_blocks=10)
    assert (
        "requests may have 40 tokens, not 50: 10 KV blocks of 4 tokens hold no more" in caplog.text
    )


def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(model="no/such/folder", device="cuda:3")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="^device cuda:3: torch .* is a build without CUDA"):
        build_engine(config)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for count, fault in ((0, "torch finds no CUDA device here"), (2, "there are 2 CUDA devices")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ValueError, match=f"^device cuda:3: {fault}"):
            build_engine(config)


def test_a_pool_of_one_block_still_serves() -> None:
    engine = build_tiny(num_blocks=1)
    assert engine.info.max_model_len == 4
    assert engine.info.exact_verified is None, "there was no room to check in"
    written, _ = write_all(engine, [[5, 6]], 9)
    assert written == [greedy_text(reference_model("llama"), [5, 6], 2)]


def test_what_the_engine_says_of_itself() -> None:
    info = build_tiny(max_num_nodes=7, drafters=("none", "ngram")).info
    model = reference_model("llama")
    assert info.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert (info.vocab_size, info.max_num_nodes) == (VOCAB_SIZE, 7)
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert set(info.drafters) == {"none", "ngram"}
    assert info.eos_token_ids == ()


# --- exactness ---


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mixtral", "gpt2", "deepseek_v3"])
def test_exact_is_the_rule_on_a_cpu_and_holds_in_fp32_too(name: str) -> None:
    """Products of 1152, which MKL sums by the number of rows; soft caps, sinks, experts and routers."""
    sizes = {} if name == "gpt2" else {"intermediate_size": 1152}
    wide = build_engine_for(tiny_model(name, **sizes), None, EngineConfig(**SMALL)).info
    assert (wide.determinism, wide.exact_verified, wide.exact_failed) == ("exact", True, ())
    assert "linear layers and other products" in wide.exact_probed
    fast = build_tiny(name, determinism="fast").info
    assert (fast.determinism, fast.exact_verified, fast.exact_probed) == ("fast", None, ())


def test_where_the_probe_says_no_exact_is_not_claimed_and_is_refused_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that sums by a row's place in its call: as MKL's does with AVX2."""
    multiply = PackedLinear.forward

    def follows_place(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        result = multiply(self, inputs)
        result.view(-1, self.out_features)[1::2] += 1e-5
        return result

    monkeypatch.setattr(PackedLinear, "forward", follows_place)
    usual = build_tiny()
    assert (usual.info.determinism, usual.info.exact_verified) == ("exact", False)
    assert usual.info.exact_failed == ("a text in steps of several kinds",)
    assert "texts may part" in caplog.text
    with pytest.raises(UnsupportedModelError, match="does not hold here: a text in steps"):
        build_tiny(determinism="exact")
    assert build_tiny(determinism="fast").info.exact_failed == ()


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="this CPU has no bf16 instructions")
def test_bf16_is_packed_and_verified_and_drafts_do_not_change_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> PreTrainedModel:
        return tiny_model("llama", torch.bfloat16, intermediate_size=1152)

    plain = build_engine_for(model(), None, EngineConfig(**SMALL))
    assert (plain.info.dtype, plain.info.exact_verified) == ("bfloat16", True)
    layers = plain.core.runner.model.modules()
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    # Gate and up are one product where our kernel multiplies.
    is_onednn = isinstance(packed[0].packed, OneDnnWeight)
    assert len(packed) == 2 * (7 if is_onednn else 5) + 1
    assert "differing bits" not in caplog.text
    config = EngineConfig(**SMALL | {"max_num_batched_tokens": 40})
    expected, written = written_with_and_without_drafts(
        plain, lambda: build_engine_for(model(), None, config), monkeypatch
    )
    assert written == expected


# --- keys and values in 8 bits ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "block_size"), [("paged", 16), ("paged", 4), ("sdpa", 4)])
def test_keys_and_values_in_8_bits_serve_a_text_that_drafts_do_not_change(
    monkeypatch: pytest.MonkeyPatch, backend: str, block_size: int, dtype: torch.dtype
) -> None:
    config = EngineConfig(
        **SMALL | {"block_size": block_size, "max_num_batched_tokens": 40, "kv_cache_dtype": "fp8"},
        attention_backend=backend,
        determinism="fast" if backend == "sdpa" else "exact",
    )
    plain = build_engine_for(tiny_model("llama", dtype), None, config)
    assert plain.core.runner.store.dtype == torch.float8_e4m3fn
    assert plain.info.attention_backend == backend
    expected, written = written_with_and_without_drafts(
        plain, lambda: build_engine_for(tiny_model("llama", dtype), None, config), monkeypatch
    )
    if backend != "sdpa":
        assert plain.info.exact_verified
        assert written == expected


def test_keys_and_values_in_8_bits_leave_room_for_more_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_sizes, "free_bytes", lambda _: 100 * 4 * BYTES_PER_TOKEN)
    sizes: dict[str, Any] = {"num_blocks": None, "kv_memory_fraction": 0.25}
    assert build_tiny(**sizes).info.num_blocks == 25
    assert build_tiny(**sizes, kv_cache_dtype="fp8").info.num_blocks == 100  # of 4 bytes, 1


# --- whole engines ---


class Trespasser(OracleDrafter):
    """Drafts tokens that the vocabulary does not have, and now and then its last one."""

    num_asked = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.num_asked += 1
        token_id = VOCAB_SIZE - 1 if self.num_asked % 2 else VOCAB_SIZE
        return [chain([token_id]) for _ in requests]


def test_drafts_outside_the_vocabulary_reach_neither_the_model_nor_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trespasser = Trespasser([], VOCAB_SIZE)
    register_oracle(monkeypatch, lambda: trespasser)
    prompt = random_ids(1, 9)
    written, _ = write_all(build_tiny(), [prompt], 12, ORACLE)
    assert written == [greedy_text(reference_model("llama"), prompt, 12)]
    assert trespasser.num_asked > 8


@pytest.mark.parametrize("name", ["gpt2", "phi3_longrope"])
def test_a_request_ends_at_the_last_position_with_drafts_up_to_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has no embedding for a later position: a draft beyond it would end the engine."""
    limit = 64
    sizes = {"max_position_embeddings": limit} if name == "gpt2" else {}
    model = tiny_model(name, **sizes)
    prompt = random_ids(1, 50)
    expected = greedy_text(model, prompt, limit - len(prompt))
    texts = [prompt + expected + [1] * 20]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    engine = build_engine_for(model, None, EngineConfig(**SMALL | {"max_num_batched_tokens": 40}))
    assert engine.info.max_model_len == limit
    written, num_accepted = write_all(engine, [prompt], 100, ORACLE)
    assert written == [expected]
    assert num_accepted > 5


def test_two_engines_of_different_models_run_side_by_side() -> None:
    async def read(engine: AsyncEngine, prompt: list[int], count: int) -> list[int]:
        request = GenerationRequest(
            "same-id", tuple(prompt), SamplingParams(max_tokens=count, temperature=0.0)
        )
        return [token async for event in engine.generate(request) for token in event.token_ids]

    async def main() -> None:
        first, second = build_tiny("gemma2"), build_tiny("gpt_oss")
        await first.start()
        await second.start()
        prompt = random_ids(1, 13)
        mine, theirs = await asyncio.gather(read(first, prompt, 15), read(second, prompt, 15))
        assert mine == greedy_text(reference_model("gemma2"), prompt, 15)
        assert theirs == greedy_text(reference_model("gpt_oss"), prompt, 15)
        await first.stop()
        assert not first.is_alive
        assert await read(second, prompt, 5) == theirs[:5]
        await second.stop()

    asyncio.run(main())


def test_a_drafter_of_layers_that_the_target_lacks_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = OracleDrafter([], VOCAB_SIZE)
    drafter.info = replace(drafter.info, needs=DrafterNeeds(hidden_rows=True))
    drafter.hidden_layers = (1, 7)
    register_oracle(monkeypatch, lambda: drafter)
    with pytest.raises(UnsupportedModelError, match="no hidden states of layer 7: .* 0 to 1"):
        build_tiny(drafters=("oracle",))


def test_a_model_serves_one_engine_only() -> None:
    model = tiny_model("llama")
    build_engine_for(model, None, EngineConfig(**SMALL))
    with pytest.raises(ValueError, match="belongs to another engine"):
        build_engine_for(model, None, EngineConfig(**SMALL))
