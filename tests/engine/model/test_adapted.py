"""Layers that adapters change: what a row gets, in every form that weights are held in, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.batch import RequestRows
from engine.capture import captures
from engine.kernels import host_kernel
from engine.model import adapted
from engine.model.adapted import AdaptedLayers
from engine.model.fused import FusedParts, fused_forward
from engine.model.fusing import fuse
from engine.model.linear import pack_linears
from engine.model.quantization import quantize_model
from engine.model.runner import ModelRunner
from worlds.lora_adapters import random_parts
from worlds.tiny_models import (
    VOCAB_SIZE,
    chunk,
    make_runner,
    own_logits,
    random_ids,
    run_together,
    tiny_model,
    tree,
)

SIZE = 16
TEXT = random_ids(5, 20)


def as_it_is(model: PreTrainedModel) -> None:
    del model


def in_passes(model: PreTrainedModel) -> None:
    assert pack_linears(model, 256, exact=True) == set()
    fuse(model, 256)


FORMS: dict[str, tuple[Callable[[PreTrainedModel], None], torch.dtype]] = {
    "fp32": (as_it_is, torch.float32),
    "packed fp32": (in_passes, torch.float32),
    "packed bf16": (in_passes, torch.bfloat16),
    "int8": (in_passes, torch.float32),
    "int8 bf16": (in_passes, torch.bfloat16),
}


def make_in_form(model: PreTrainedModel, form: str) -> ModelRunner:
    if form.startswith("int8"):
        quantize_model(model)
    runner = make_runner(model, exact=True, block_size=SIZE)
    FORMS[form][0](runner.model)
    return runner


class World:
    """A tiny model in some form, and three adapters of it."""

    def __init__(self, form: str, name: str = "llama", **changes: Any) -> None:
        changes = {"intermediate_size": 128} | changes
        self.runner = make_in_form(tiny_model(name, FORMS[form][1], **changes), form)
        self.layers: AdaptedLayers = self.runner.serve_adapters()
        self.parts = [random_parts(self.layers.shapes, seed, rank=3 + seed) for seed in range(3)]
        self.adapters = [self.layers.pack(parts) for parts in self.parts]

    def rows(self, adapter: int | None, first_block: int = 0, count: int = 20) -> RequestRows:
        found = chunk(TEXT, 0, count, range(first_block, first_block + 2))
        found.adapter = None if adapter is None else self.adapters[adapter]
        return found


@pytest.mark.parametrize("form", list(FORMS))
def test_rows_have_the_same_bits_beside_others_and_alone(form: str) -> None:
    world = World(form)
    mixed = run_together(
        world.runner, [world.rows(each, 2 * at) for at, each in enumerate((0, None, 1, 2, None))]
    )
    for at, each in enumerate((0, None, 1, 2, None)):
        (alone,) = run_together(world.runner, [world.rows(each, 20)])
        assert torch.equal(alone, mixed[at])
    assert torch.equal(mixed[1], mixed[4])
    for one, other in ((0, 1), (0, 2), (0, 3), (2, 3)):
        assert (mixed[one] - mixed[other]).abs().max() > 0.1


@pytest.mark.parametrize("form", list(FORMS))
def test_chunks_and_trees_have_their_requests_adapter(form: str) -> None:
    world = World(form)
    (whole,) = run_together(world.runner, [world.rows(1)])
    first = chunk(TEXT, 0, 9, range(4, 6))
    nodes, parents = [TEXT[10], TEXT[11], 5, TEXT[12]], [-1, 0, 0, 1]
    rest = tree(TEXT[:10], 1, nodes, parents, range(4, 6))
    first.adapter = rest.adapter = world.adapters[1]
    (begun,) = run_together(world.runner, [first])
    (drafted,) = run_together(world.runner, [rest])
    found = torch.cat([begun, drafted[[0, 1, 2, 4]]])
    # A library's own products of floats may add in another order for another number of rows.
    closeness = {"rtol": 1e-5, "atol": 1e-5} if form == "fp32" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, whole[:13], **closeness)


@pytest.mark.parametrize("form", ["packed fp32", "packed bf16", "int8 bf16"])
def test_recordings_follow_the_rows_adapters(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_OFTEN", 2)
    world = World(form)
    mixes: list[Sequence[int | None]] = [
        (None, None, None), (0, None, 1), (2, 2, 2), (1, 0, None), (None, 1, 2), (0, 1, 0), (None,) * 3
    ]  # fmt: skip
    texts = [chunk(TEXT, 0, 12, range(2 * at, 2 * at + 2)) for at in range(3)]

    def run(mix: Sequence[int | None]) -> list[torch.Tensor]:
        for at, each in enumerate(mix):
            texts[at].adapter = None if each is None else world.adapters[each]
        return run_together(world.runner, texts)

    replays: Any = world.runner._replays
    for _ in range(3):
        for mix in mixes:
            for got, each in zip(run(mix), mix, strict=True):
                (alone,) = run_together(world.runner, [world.rows(each, 10, count=13)])
                assert torch.equal(got, alone[:12])
    recorded = {kind.is_adapted for kind, each in replays._captures.items() if each.known}
    assert recorded == {True, False}


def test_what_was_loaded_is_let_go_with_its_last_rows() -> None:
    """An address that another adapter gets later is the other's then, in recordings, too."""
    world = World("packed fp32")
    expected = [run_together(world.runner, [world.rows(at)])[0] for at in range(3)]
    for _ in range(20):
        for at, parts in enumerate(world.parts):
            world.adapters[at] = world.layers.pack(parts)
            assert torch.equal(run_together(world.runner, [world.rows(at)])[0], expected[at])


def test_gated_networks_in_two_passes_keep_their_layers() -> None:
    for form in ("packed fp32", "int8"):
        world = World(form)
        gated = [fused_forward(each) for each in world.runner.model.modules()]
        assert sum(isinstance(each, FusedParts) for each in gated) == 2
        assert set(world.layers.shapes) == set(World("fp32").layers.shapes)


def test_every_layer_has_its_share() -> None:
    """An adapter of one layer alone changes the logits, and by what that layer's product says."""
    for form in ("fp32", "packed fp32", "int8"):
        world = World(form)
        (base,) = run_together(world.runner, [world.rows(None)])
        for name in world.layers.shapes:
            adapter = world.layers.pack({name: world.parts[0][name]})
            rows = world.rows(None)
            rows.adapter = adapter
            (got,) = run_together(world.runner, [rows])
            assert (got - base).abs().max() > 1e-3, name


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma2", "qwen3"])
@pytest.mark.parametrize("form", ["fp32", "packed fp32", "int8"])
def test_other_architectures_compute_what_merged_weights_do(name: str, form: str) -> None:
    changes = {} if name == "gpt2" else {"intermediate_size": 128}
    model = tiny_model(name, **changes)
    runner = make_in_form(tiny_model(name, **changes), form)
    layers = runner.serve_adapters()
    shapes = {each: shape for each, shape in layers.shapes.items() if each != "lm_head"}
    assert len(shapes) == 4 * 2 or len(shapes) % len(model.base_model.layers) == 0
    parts = random_parts(shapes, 4, rank=5, scale=0.3)
    rows = chunk(TEXT, 0, 20, range(2))
    rows.adapter = layers.pack(parts)
    (got,) = run_together(runner, [rows])
    (base,) = run_together(runner, [chunk(TEXT, 0, 20, range(2, 4))])
    merge(model, parts)
    expected = own_logits(model, TEXT)
    assert (base - expected).abs().mean() > 0.2
    if form == "int8":
        # 8 bits round the base's weights and inputs; the adapter's are as they are.
        assert (got - expected).abs().mean() < 0.35 * (base - expected).abs().mean()
    else:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_experts_have_no_place_for_an_adapter_and_what_all_rows_see_has() -> None:
    shapes = make_runner(tiny_model("qwen3_moe"), exact=True).serve_adapters().shapes
    assert "model.layers.0.self_attn.q_proj" in shapes
    assert not any("experts" in name for name in shapes)


def test_the_head_takes_the_rows_that_have_logits() -> None:
    world = World("packed fp32")
    adapter = world.layers.pack({"lm_head": world.parts[0]["lm_head"]})
    few, whole = chunk(TEXT, 0, 20, range(2)), world.rows(None, 4)
    few.num_logits, few.adapter, whole.adapter = 1, adapter, adapter
    neighbour = world.rows(None, 8)
    got, expected, _ = run_together(world.runner, [few, whole, neighbour])
    assert torch.equal(got[0], expected[-1])
    model = tiny_model("llama", intermediate_size=128)
    merge(model, {"lm_head": world.parts[0]["lm_head"]})
    torch.testing.assert_close(expected, own_logits(model, TEXT), rtol=1e-3, atol=1e-3)


def test_devices_without_the_kernel_add_by_torchs_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("fp32")
    expected = run_together(world.runner, [world.rows(each, 2 * at) for at, each in MIX])
    monkeypatch.setattr(adapted, "host_kernel", lambda *_: None)
    world.adapters = [world.layers.pack(parts) for parts in world.parts]
    got = run_together(world.runner, [world.rows(each, 2 * at) for at, each in MIX])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1], expected[1])


MIX = list(enumerate((0, None, 1, 2, 1)))


def merge(model: PreTrainedModel, parts: Any) -> None:
    for name, (first, second) in parts.items():
        module: Any = model.get_submodule(name)
        delta = second @ first
        is_turned = module.weight.shape != delta.shape or type(module).__name__ == "Conv1D"
        module.weight.data += delta.T if is_turned else delta


def test_a_step_of_adapted_rows_leaves_nothing_behind() -> None:
    world = World("packed fp32")
    run_together(world.runner, [world.rows(0)])
    assert world.layers.step is None
    kernel = host_kernel("low_rank", torch.device("cpu"))
    assert kernel is not None
    broken = chunk([VOCAB_SIZE + 5] * 3, 0, 3, range(2))
    broken.adapter = world.adapters[0]
    with pytest.raises(IndexError):
        run_together(world.runner, [broken])
    assert world.layers.step is None
