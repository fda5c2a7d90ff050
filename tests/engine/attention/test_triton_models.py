"""Whole models on Triton's programs: transformers' own logits, equal texts under drafts, and forwards
that a tracer sees from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from engine.attention.backend import attending
from engine.attention.triton import TritonAttention
from engine.batch import build_batch
from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_logits, reference_logits
from engine.process.threaded import AsyncEngine
from worlds.engine_driver import ORACLE, OracleDrafter, register_oracle, write_all
from worlds.interpreted import ON_CPU, compiled_ahead, patching_once
from worlds.tiny_models import (
    VOCAB_SIZE,
    chunk,
    make_runner,
    random_ids,
    reference_model,
    tiny_model,
    tree,
)

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 24,
    "max_num_batched_tokens": 12,
    "max_num_seqs": 2,
    "max_model_len": 64,
    "check_integrity": True,
}


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(TritonAttention, "chunk", 16)
        yield


@ON_CPU
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_model_writes_its_own_logits_in_chunks_and_under_a_draft_tree(name: str) -> None:
    """With windows in every other layer, and with soft caps, or sinks."""
    model = reference_model(name)
    check_logits(make_runner(model, False, attention="triton"), reference_logits(model))


@ON_CPU
@pytest.mark.parametrize(
    "name",
    ["mistral", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma2", "gpt_oss"))],
)
def test_drafted_texts_are_gamma_0_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under drafts they are accepted from trees, so that rows do not lie where they end; gamma 0's is
    another backend's text."""

    def build(**attention: Any) -> AsyncEngine:
        layers = {"num_hidden_layers": 1} if name in ("llama", "mistral") else {}
        config = EngineConfig(**SMALL, **attention, determinism="fast")
        return build_engine_for(tiny_model(name, **layers), None, config)

    prompts = [random_ids(1, 9), random_ids(2, 20)]
    expected, _ = write_all(build(), prompts, 8)
    texts = [prompt + written for prompt, written in zip(prompts, expected, strict=True)]
    register_oracle(monkeypatch, lambda: OracleDrafter(texts, VOCAB_SIZE))
    engine = build(attention_backend="triton")
    assert engine.info.attention_backend == "triton"
    written, num_accepted = write_all(engine, prompts, 8, ORACLE)
    assert written == expected
    assert num_accepted > 0


# --- traced ---


def traceable() -> tuple[ModelRunner, Any, tuple[torch.Tensor, ...]]:
    """A model's forward over a step's tensors: a chunk, and a draft tree."""
    runner = make_runner(tiny_model("llama"), False, attention="triton")
    text = random_ids(3, 12)
    requests = [chunk(text, 0, 5, range(6)), tree(text, 12, [3, 4, 5], (-1, -1, 0), range(6, 12))]
    batch = build_batch(requests, runner.store.block_size)
    inputs = runner._buffers.fill(batch)
    plan = runner.attention.plan(batch, inputs)

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        token_ids, positions, logits_indices = tensors
        with attending(plan):
            logits: torch.Tensor = runner.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logits_indices,
            ).logits
        return logits

    return runner, forward, (inputs.token_ids, inputs.positions, inputs.logits_indices)


@ON_CPU
@torch.no_grad()
def test_a_whole_forward_compiles_without_a_break() -> None:
    """Nothing in it reads the device, or branches on what lies there."""
    _, forward, tensors = traceable()
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors), forward(*tensors))


@ON_CPU
@torch.no_grad()
def test_a_forward_over_fake_tensors_is_traced_with_one_call_per_layer() -> None:
    runner, forward, tensors = traceable()
    traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    calls = [node for node in traced.graph.nodes if "ragged_attention" in str(node.target)]
    assert len(calls) == runner.model.config.num_hidden_layers
    assert not runner.store.key[0].any(), "nothing was computed"
    assert torch.equal(traced(*tensors), forward(*tensors))


# --- compiled for devices that are not here ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "variants"),
    [
        (80, ["8 B, prompts", "8 B, 8-bit floats", "products, bf16", "products, few outputs"]),
        (
            90,
            ["8 B, drafts", "8 B, exact", "8 B, 8-bit floats", "gpt-oss", "gemma 2"]
            + ["products, divided", "products, few outputs", "products, fp32"]
            + ["passes", "copies", "experts"],
        ),
        (100, ["8 B, prompts", "8 B, 8-bit floats", "products, bf16"]),
    ],
)
def test_programs_are_compiled_for_devices_that_are_not_here(
    capability: int, variants: list[str], tmp_path: Path
) -> None:
    """They spill no registers, but for two on sm_80."""
    told = compiled_ahead(capability, variants, tmp_path)
    num_products = sum(each.startswith("products") for each in variants)
    others = {"passes", "copies", "experts"}.intersection(variants)
    num_attending = len(variants) - num_products - len(others)
    assert told.count("compiled attend") == num_attending
    assert told.count("compiled copy_drafts") == 2 * variants.count("copies")
    assert told.count("compiled lay_pairs") == 2 * variants.count("experts")
    assert told.count("compiled rotate_and_store") == 4 * variants.count("passes")
    assert told.count("compiled multiply") == num_products
    assert told.count("compiled join") == told.count("compiled store_rows") == 1
