"""All passes together: what is said of them, and that a model writes what it wrote."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.backend import AttentionNeeds, build_attention
from engine.model.fusing import fuse
from engine.model.gated import GatedFeedForward
from engine.model.int8 import is_exact
from engine.model.linear import pack_linears
from engine.model.loader import attach_attention
from engine.model.norms import FusedNorm
from engine.model.quantization import quantize_model
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact, check_logits, reference_logits
from worlds.tiny_models import BLOCK_SIZE, own_logits, random_ids, tiny_model

needs_int8 = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
IDS = random_ids(3, 28)
# Of the logits' spread, on average: a step of the type here and there, after few and large layers.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def said(caplog: pytest.LogCaptureFixture, model: nn.Module) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="engine.model.fusing"):
        fuse(model)
    return [each.getMessage() for each in caplog.records]


def parts(model: nn.Module) -> list[object]:
    """What stands where, and with which forward."""
    return [(each, vars(each).get("forward")) for each in model.modules()]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral"])
def test_logits_stay_what_they_are_within_a_step(name: str, dtype: torch.dtype) -> None:
    wide = {"head_dim": 32} | ({"hidden_size": 128} if name == "phi3" else {})
    model = tiny_model(name, dtype, **wide)
    expected = own_logits(model, IDS).float()
    fuse(model)
    got = own_logits(model, IDS).float()
    assert any(isinstance(each, FusedNorm) for each in model.modules())
    assert (got - expected).abs().mean() < TOLERANCE[dtype] * expected.std()


@needs_int8
def test_what_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", head_dim=32)
    plain = copy.deepcopy(model)
    quantize_model(model)
    expected = "in one pass each: 5 norms, 2 rotary embeddings"
    assert said(caplog, model) == [f"{expected}, 2 gated networks"]
    assert said(caplog, plain) == [expected]
    assert said(caplog, nn.Linear(16, 16)) == ["in one pass each: nothing"]


@needs_int8
def test_a_second_time_there_is_nothing_left_to_do(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("gemma2", torch.bfloat16, head_dim=32)
    quantize_model(model)
    fuse(model)
    before, expected = parts(model), own_logits(model, IDS)
    assert said(caplog, model) == ["in one pass each: nothing"]
    assert parts(model) == before
    assert torch.equal(own_logits(model, IDS), expected)


def test_models_on_other_devices_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", head_dim=32).to("meta")
    before = parts(model)
    assert said(caplog, model) == []
    assert parts(model) == before


def runner_of(model: PreTrainedModel) -> ModelRunner:
    shapes = attach_attention(model)
    pack_linears(model, 64, exact=True)
    needs = AttentionNeeds.of(model, shapes, "exact", BLOCK_SIZE)
    return ModelRunner(model, build_attention(needs, 24))


@needs_int8
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mistral", "deepseek_v3"])
def test_rows_of_a_model_keep_their_bits_however_they_are_cut(name: str) -> None:
    changes = {} if name == "deepseek_v3" else {"head_dim": 32}
    model = tiny_model(name, **changes)
    quantize_model(model)
    fuse(model)
    reference = reference_logits(model)
    runner = runner_of(model)
    assert any(isinstance(each, GatedFeedForward) for each in model.modules())
    check_logits(runner, reference)
    assert check_exact(runner)
