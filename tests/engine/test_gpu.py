"""The same code on a GPU; skipped where there is none. ``bench/gpu_check`` also measures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.machine import free_bytes
from engine.model.loader import load_model, prepare_model
from engine.request.params import SpeculativeParams
from worlds.engine_driver import ORACLE, PLAIN, OracleDrafter, register_oracle, write_all
from worlds.packed_models import FORMATS
from worlds.packed_target import PackedTarget, check_no_bit_changes
from worlds.tiny_models import VOCAB_SIZE, own_logits, random_ids, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
CUDA = torch.device("cuda")
SMALL: dict[str, Any] = {
    "device": "cuda",
    "block_size": 4,
    "num_blocks": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "prefill_chunk": 9,
    "check_integrity": True,
}
NUM_WRITTEN = 32
# The second half of each repeats the first, for the drafter that looks it up.
PROMPTS = [random_ids(seed, count) * 2 for seed, count in ((1, 9), (2, 20), (3, 5))]
NGRAM = SpeculativeParams(
    draft_strategy="ngram",
    adaptive_depth="fixed",
    num_speculative_tokens=8,
    tree_strategy="tree",
    tree_width=2,
    tree_depth=6,
)
MODELS = pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt_oss"])


def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return prepare_model(copy.deepcopy(tiny_model(name, dtype)), CUDA)


@MODELS
def test_drafting_writes_what_gamma_0_and_the_cpu_write(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = write_all(
        build_engine_for(on_gpu(name), None, EngineConfig(**SMALL)), PROMPTS, NUM_WRITTEN
    )
    on_cpu = EngineConfig(**SMALL | {"device": "cpu"})
    there, _ = write_all(build_engine_for(tiny_model(name), None, on_cpu), PROMPTS, NUM_WRITTEN)
    assert plain == there
    texts = [prompt + written for prompt, written in zip(PROMPTS, plain, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    num_accepted = 0
    for drafting in (NGRAM, ORACLE):
        engine = build_engine_for(on_gpu(name), None, EngineConfig(**SMALL))
        written, num_accepted = write_all(engine, PROMPTS, NUM_WRITTEN, drafting)
        assert written == plain
    assert num_accepted > NUM_WRITTEN  # the oracle's


def test_sampled_text_is_equal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(drafting: SpeculativeParams) -> tuple[list[list[int]], int]:
        engine = build_engine_for(on_gpu("llama"), None, EngineConfig(**SMALL))
        return write_all(engine, PROMPTS, NUM_WRITTEN, drafting, temperature=0.8)

    plain, _ = write(PLAIN)
    texts = [prompt + written for prompt, written in zip(PROMPTS, plain, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    written, num_accepted = write(ORACLE)
    assert written == plain
    assert num_accepted > NUM_WRITTEN


def test_bf16_runs_and_follows_the_model() -> None:
    """Kernels may round differently per shape, so its text is held to the model's own likely tokens."""
    engine = build_engine_for(on_gpu("llama", torch.bfloat16), None, EngineConfig(**SMALL))
    assert (engine.info.device, engine.info.dtype) == ("cuda:0", "bfloat16")
    assert (engine.info.determinism, engine.info.exact_verified) == ("fast", None)
    written, _ = write_all(engine, PROMPTS, NUM_WRITTEN, NGRAM)
    for prompt, text in zip(PROMPTS, written, strict=True):
        logits = own_logits(tiny_model("llama"), prompt + text)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        # The likeliest of 97 tokens leads a random one by 5; bf16 moves logits by some tenths.
        assert (logits.max(dim=1).values - chosen).max() < 1.0


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_in_few_bits_are_served_as_floats_with_drafts_of_all_kinds(
    name: str, tmp_path: Path
) -> None:
    """Weights are the same floats as on a CPU, and drafts change no bit."""
    path = FORMATS[name](tmp_path)
    check_no_bit_changes(PackedTarget(path, True, CUDA), "mixed_batch")
    here = load_model(str(path), CUDA).state_dict()
    for key, there in load_model(str(path), torch.device("cpu"), packed=False).state_dict().items():
        assert torch.equal(here[key].cpu(), there), key


def test_gpu_memory_sizes_the_pool() -> None:
    free, (_, total) = free_bytes(CUDA), torch.cuda.mem_get_info(CUDA)
    assert 0 < free <= total
    model = on_gpu("llama")
    bytes_per_block = 4 * 2 * 2 * 2 * 16 * 4  # slots, layers, keys and values, heads, dimensions
    fraction = 100 * bytes_per_block / free
    config = EngineConfig(**SMALL | {"num_blocks": None, "kv_memory_fraction": fraction})
    before = torch.cuda.memory_allocated()
    engine = build_engine_for(model, None, config)
    # Others may use the device meanwhile.
    assert 50 < engine.info.num_blocks <= 110
    assert torch.cuda.memory_allocated() - before >= engine.info.num_blocks * bytes_per_block
