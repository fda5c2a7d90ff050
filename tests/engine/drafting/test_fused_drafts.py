"""Draft models with modules of their own run in fewer passes, and draft what they drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from drafters.base import DraftRequest, DraftShape, HiddenRows
from drafters.model.protocol import Candidates, DraftRows
from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import build_batch
from engine.config import EngineConfig
from engine.drafting import heads, models
from engine.drafting.draft_model import EngineDraftModel
from engine.drafting.drafts import find_drafts
from engine.drafting.heads import prepare_heads
from engine.drafting.models import DraftModels, prepare_drafts
from engine.model import fusing
from engine.model.fused import FusedNorm, fused_forward
from engine.model.fusing import FusedRotation, GatedGroups, fuse
from engine.model.loader import attach_attention
from engine.model.quantization import refusal
from engine.model.runner import ModelRunner
from worlds.engine_harness import Setup
from worlds.tiny_models import CPU, VOCAB_SIZE, random_ids, tiny_model
from worlds.trained_heads import TARGET, target_states, write_heads

BLOCK_SIZE, NUM_BLOCKS = 4, 64
TEXTS = [random_ids(seed, 9 + 5 * seed) for seed in range(3)]
needs_int8 = pytest.mark.skipif(refusal(CPU) is not None, reason="this CPU has no such products")


def target(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model("llama", dtype, head_dim=32)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The folder of a draft model with the target's weights."""
    target().save_pretrained(tmp_path)
    return str(tmp_path)


def counts(model: nn.Module) -> tuple[int, int, int]:
    """Norms, rotary embeddings, gated networks."""
    every = [fused_forward(each) for each in model.modules()]
    kinds = (FusedNorm, FusedRotation, GatedGroups)
    first, second, third = (sum(isinstance(each, kind) for each in every) for kind in kinds)
    return first, second, third


def prepared(model: PreTrainedModel, kind: str, **settings: Any) -> DraftModels:
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 64}
    config = EngineConfig(**sizes, drafters=(kind,), **settings)
    return prepare_drafts(model, None, config, find_drafts(config))


def attached(model: PreTrainedModel, drafts: DraftModels, kind: str) -> EngineDraftModel:
    """As an engine does it, which checks the draft model's logits."""
    shapes = attach_attention(model)
    fuse(model)
    needs = AttentionNeeds.of(model, shapes, "fast", BLOCK_SIZE)
    runner = ModelRunner(model, build_attention(needs, NUM_BLOCKS))
    drafts.attach(runner, shapes, VOCAB_SIZE, 64)
    return drafts.get(kind)


def drafted(model: EngineDraftModel) -> list[Candidates]:
    """Returns four candidates for what follows every token of some texts."""
    rows = []
    for index, text in enumerate(TEXTS):
        table = list(range(8 * index, 8 * index + 8))
        ask = DraftRequest(f"r{index}", text, 8, DraftShape(), block_table=table)
        rows.append(DraftRows(ask, text, 0, len(text), 4))
    found = model.read_now(lambda readback: model.begin([rows], readback)).candidates[0]
    return [each for part in found for each in part]


def check_same(got: list[Candidates], expected: list[Candidates]) -> None:
    assert len(got) == len(expected) == sum(map(len, TEXTS))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.confidences == pytest.approx(theirs.confidences, rel=1e-3, abs=1e-6)


@needs_int8
@pytest.mark.parametrize("copied", ["target", "draft"])
def test_a_quantised_copy_is_fused_and_its_drafts_stay_the_same(
    copied: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"quantized": "int8", "quantized_model": copied}
    if copied == "draft":
        settings["draft"] = (f"small_model={folder}",)
    model = target()
    drafts = prepared(model, "quantized", **settings)
    assert counts(model) == (0, 0, 0)  # its modules are still transformers'
    got = attached(model, drafts, "quantized")
    assert counts(got._runner.model) == (5, 2, 2)
    assert counts(model) == (5, 2, 0)

    monkeypatch.setattr(models, "fuse", lambda *_: None)
    plain = target()
    expected = attached(plain, prepared(plain, "quantized", **settings), "quantized")
    assert counts(expected._runner.model) == (0, 0, 0)
    check_same(drafted(got), drafted(expected))


def test_so_is_a_small_model(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    got = attached(model, prepared(model, "small_model", draft=(folder,)), "small_model")
    assert counts(got._runner.model) == (5, 2, 0)
    monkeypatch.setattr(models, "fuse", lambda *_: None)
    plain = target()
    drafts = prepared(plain, "small_model", draft=(folder,))
    check_same(drafted(got), drafted(attached(plain, drafts, "small_model")))


def test_weights_are_packed_after_that(folder: str) -> None:
    model = target(torch.bfloat16)
    drafts = prepared(model, "small_model", draft=(folder,), dtype="bfloat16")
    got = attached(model, drafts, "small_model")
    assert counts(got._runner.model) == (5, 2, 0)
    assert drafted(got)


def test_layers_of_the_target_are_fused_with_it_and_not_before() -> None:
    model = target()
    drafts = prepared(model, "prefix_layers", prefix_layers="1")
    assert counts(model) == (0, 0, 0)
    got = attached(model, drafts, "prefix_layers")._runner.model
    assert counts(got) == (3, 1, 0)
    assert {*filter(fused_forward, got.modules())} <= {*model.modules()}


@pytest.mark.parametrize(("method", "expected"), [("eagle3", (4, 1, 0)), ("dflash", (8, 3, 0))])
def test_layers_of_heads_are_fused_and_say_the_same(
    tmp_path: Path, method: str, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_heads(tmp_path)[method]
    tiny = TARGET.reference
    config = EngineConfig(model="x", draft=(f"mine={folder}",), block_size=BLOCK_SIZE)

    def states() -> tuple[nn.Module, torch.Tensor]:
        prepared_heads = prepare_heads(tiny, config, find_drafts(config))
        core = TARGET.core(Setup(num_blocks=NUM_BLOCKS))
        head = prepared_heads.load("mine", core.runner, 64)
        network = prepared_heads.networks["mine"]
        with torch.inference_mode():
            return network, logits_of(head, network)

    fused, got = states()
    assert counts(fused) == expected
    monkeypatch.setattr(heads, "fuse", lambda *_: None)
    plain, wanted = states()
    assert counts(plain) == (0, 0, 0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_rows_of_blocks_lie_beyond_the_longest_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are whole however little may follow."""
    monkeypatch.setattr(fusing, "_LEAST_POSITIONS", 1)
    folder = write_heads(tmp_path)["dflash"]
    config = EngineConfig(model="x", draft=(f"mine={folder}",), block_size=BLOCK_SIZE)
    prepared_heads = prepare_heads(TARGET.reference, config, find_drafts(config))
    head = prepared_heads.load("mine", TARGET.core(Setup(num_blocks=NUM_BLOCKS)).runner, 9)
    with torch.inference_mode():
        assert bool(logits_of(head, prepared_heads.networks["mine"]).isfinite().all())


def logits_of(head: Any, network: Any) -> torch.Tensor:
    """Returns the logits of the rows of a text of 8 tokens, in one forward: all known, or a block."""
    text = random_ids(3, 8, 60)
    ask = DraftRequest("r", text, 4, DraftShape(1, 4), block_table=range(8))
    states = target_states(text[:-1])
    hidden = tuple(states[layer] for layer in network.hidden_layers)
    head.take_hidden([HiddenRows("r", 0, text, hidden, range(8))])
    rows = DraftRows(ask, text[head.first_row :], head.first_row, 1)
    batch = build_batch([head._rows_of(rows)], BLOCK_SIZE)
    logits: torch.Tensor = head._logits([rows], batch)
    return logits
