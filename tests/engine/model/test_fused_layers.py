"""Decoder layers in few launches: what is found, that models write what they wrote with the bits that
rows have alone, and how many launches a layer takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Ministral3Config, PreTrainedModel

from engine.attention import triton as attention
from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import build_batch
from engine.capture.replays import DeviceGraphs, GraphSizes
from engine.kernels.triton import Variant, code_ops, row_ops
from engine.kernels.triton.row_ops import added_up, row_norm
from engine.model import fused, fusing, linear
from engine.model.fused import Fused, FusedNorm, fused_forward
from engine.model.fused_layers import FusedAttention, FusedLayer, GatedRows, JointCodes
from engine.model.fusing import fuse
from engine.model.layers import GroupedLinear, PackedLinear
from engine.model.linear import DeviceWeight, pack_linears
from engine.model.loader import attach_attention
from engine.model.product import GroupedProduct
from engine.model.quantization import complete_packed, quantize_model
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact, check_logits, reference_logits
from engine.request.info import Determinism
from worlds.device_world import no_host
from worlds.graph_maker import ReplayingMaker
from worlds.interpreted import ON_CPU, patching_once
from worlds.launches import counting_launches
from worlds.tiny_models import (
    BLOCK_SIZE,
    chunk,
    random_ids,
    run_chunks,
    run_together,
    scattered_table,
    tiny_model,
    tree,
)

pytestmark = ON_CPU
NUM_PROCESSORS = 4


def small_tile(*_: Any) -> Variant:
    """Layers and texts are small, and so are tiles and chunks: there are several of each."""
    return row_ops._tile(16, 64, 32, 32, row_ops.launch_of(4, 1))


@pytest.fixture(autouse=True)
def on_a_device() -> Iterator[None]:
    """A CPU passes for a device of several processors."""
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(fused, "row_norm_for", lambda *_: row_norm)
        patch.setattr(fusing, "_have_programs", lambda _: True)
        patch.setattr(linear, "pack_weight", lambda weight, bias, *_: DeviceWeight(weight, bias))
        patch.setattr(row_ops, "_enough_programs", lambda _: 2 * NUM_PROCESSORS)
        patch.setattr(row_ops, "product_tile", small_tile)
        patch.setattr(code_ops, "_CHUNKS", (32,))
        patch.setattr(attention, "num_processors", lambda _: NUM_PROCESSORS)
        patch.setattr(attention.TritonAttention, "chunk", 16)
        yield


def served(
    model: PreTrainedModel, determinism: Determinism = "fast", is_fused: bool = True
) -> ModelRunner:
    shapes = attach_attention(model)
    if determinism == "exact":
        pack_linears(model, 64, exact=False)
    if is_fused:
        fuse(model)
    needs = AttentionNeeds.of(model, shapes, determinism, BLOCK_SIZE)
    return ModelRunner(model, build_attention(needs, 97, "triton"))


def plain(model: PreTrainedModel) -> ModelRunner:
    """Returns a runner on the library's products and another backend's attention, without any of our
    programs."""
    model = copy.deepcopy(model)
    shapes = attach_attention(model)
    needs = AttentionNeeds.of(model, shapes, "fast", BLOCK_SIZE)
    return ModelRunner(model, build_attention(needs, 97, "sdpa"))


def quantized(name: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """A model in 8 bits, as a device holds it."""
    model = tiny_model(name, dtype, **changes)
    with no_host():
        quantize_model(model)
        complete_packed(model)
    return model


def launches_of(model: PreTrainedModel, determinism: Determinism, is_fused: bool) -> int:
    """Counts a row's launches after several chunks. Norms are fused in any case."""
    if not is_fused:
        for each in model.modules():
            if (norm := fused.find_norm(each)) is not None:
                vars(each)["forward"] = norm
    runner = served(model, determinism, is_fused)
    text, table = random_ids(1, 40), scattered_table(0, 12)
    with counting_launches() as counted:
        runner.forward(build_batch([chunk(text, 39, 1, table)], BLOCK_SIZE))
    return len(counted)


def adapter_of(layers: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Both parts of an adapter, of every layer of a Llama and the head."""
    generator, parts = torch.Generator().manual_seed(1), {}
    for name, (width, features) in sorted(layers.shapes.items()):
        first, second = (
            0.2 * torch.randn(sizes, generator=generator) for sizes in ((4, width), (features, 4))
        )
        parts[name] = first, second
    assert len(parts) == 2 * 7 + 1
    return parts


def kinds(model: nn.Module) -> dict[type, int]:
    every = [type(fused_forward(each)) for each in model.modules()]
    wanted: tuple[type[Fused], ...] = (FusedNorm, FusedAttention, GatedRows, FusedLayer)
    return {each: every.count(each) for each in wanted}


def written(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of a prompt, single rows, a tree, and of two texts together."""
    text, one = random_ids(1, 44), scattered_table(0, 12)
    nodes, two = (5, 9, 13), scattered_table(1, 12, first=24)
    logits = [run_chunks(runner, text, (37, 1), one)]
    logits += run_together(runner, [tree(text[:40], 2, nodes, (-1, 0, -1), one)])
    return logits + run_together(runner, [chunk(text, 40, 1, one), chunk(text, 0, 9, two)])


@pytest.mark.parametrize("determinism", ["fast", "exact"])
@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("llama", {}, (5, 2, 2, 2)),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}, (5, 2, 2, 2)),
        ("qwen2", {}, (5, 2, 2, 2)),
        ("qwen3", {}, (9, 2, 2, 2)),
        ("phi3", {}, (5, 2, 2, 2)),
        # Norms of what enters the residual, too.
        ("gemma2", {}, (17, 4, 4, 0)),
    ],
)
def test_models_write_what_they_wrote(
    name: str, changes: dict[str, Any], found: tuple[int, ...], determinism: Determinism
) -> None:
    model = tiny_model(name, **changes)
    wanted = written(plain(model))
    runner = served(model, determinism)
    assert tuple(kinds(model).values()) == found
    torch.testing.assert_close(written(runner), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    model = tiny_model(name, torch.float16)
    reference = reference_logits(model)
    runner = served(model, "exact")
    check_logits(runner, reference)
    assert check_exact(runner)


@pytest.mark.parametrize(
    ("name", "determinism", "before"),
    [("llama", "fast", 26), ("llama", "exact", 33), ("qwen3", "fast", 28), ("qwen3", "exact", 35)],
)
def test_a_layer_takes_few_launches(name: str, determinism: Determinism, before: int) -> None:
    """One row after a text of several chunks, products divided: see docs/gpu.md."""

    def launches(num_layers: int, is_fused: bool) -> int:
        model = tiny_model(name, torch.float16, num_hidden_layers=num_layers)
        return launches_of(model, determinism, is_fused)

    assert launches(2, is_fused=False) - launches(1, is_fused=False) == before
    assert launches(2, is_fused=True) - launches(1, is_fused=True) == 10


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("llama", {"attention_bias": True}, (5, 2, 2, 2)),
        ("qwen3", {}, (9, 2, 2, 2)),
        ("qwen3_moe", {}, (9, 2, 0, 2)),
        ("gpt_oss", {}, (5, 0, 0, 0)),
        ("gemma2", {}, (17, 4, 4, 0)),
    ],
)
def test_quantized_models_write_what_they_wrote(
    name: str, changes: dict[str, Any], found: tuple[int, ...]
) -> None:
    model, same = (quantized(name, torch.float32, **changes) for _ in range(2))
    runner, unfused = served(model), served(same, is_fused=False)
    assert tuple(kinds(model).values()) == found
    torch.testing.assert_close(written(runner), written(unfused), rtol=1e-4, atol=1e-4)


def test_quantized_layers_of_other_products_are_joined() -> None:
    """In the order in which a pass reads them, from wherever they lie."""
    model = quantized("llama", torch.float32)
    network: Any = model.get_decoder().layers[0].mlp
    both = network.gate_proj, network.up_proj
    rows = torch.randn(3, both[0].in_features, generator=torch.Generator().manual_seed(1))
    other = GroupedLinear(*_other(network))
    for layers in (both, both[::-1], both[1:], (both[1], other)):
        joint = JointCodes(layers)
        expected = torch.cat([each(rows.clone()) for each in layers], 1)
        assert torch.equal(joint.whole(rows), expected)
        assert torch.equal(added_up(joint.sums(rows), torch.float32), expected)


def _other(network: Any) -> tuple[Any, int, str, str]:
    """A layer of a product of its own."""
    product = network.gate_proj.product
    alone = GroupedProduct(product.packed, product.dtype)
    return alone, product.out_features, "int8", "int8"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_row_of_a_quantized_model_has_the_same_bits_in_any_company(name: str) -> None:
    assert check_exact(served(quantized(name, torch.float16), "exact"))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("llama", 27, 10), ("qwen3", 29, 10), ("qwen3_moe", 35, 19)],
)
def test_a_quantized_layer_takes_few_launches(name: str, before: int, after: int) -> None:
    def launches(num_layers: int, is_fused: bool) -> int:
        model = quantized(name, torch.float16, num_hidden_layers=num_layers)
        return launches_of(model, "exact", is_fused)

    assert launches(2, is_fused=False) - launches(1, is_fused=False) == before
    assert launches(2, is_fused=True) - launches(1, is_fused=True) == after


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_weights_are_held_once(determinism: Determinism) -> None:
    model = tiny_model("llama", attention_bias=True)
    served(model, determinism)
    layers: Any = model.get_decoder().layers
    own, network = layers[0].self_attn, layers[0].mlp
    for parts in ((own.q_proj, own.k_proj, own.v_proj), (network.gate_proj, network.up_proj)):
        held = [each.packed if isinstance(each, PackedLinear) else each for each in parts]
        places = {each.weight.untyped_storage().data_ptr() for each in held}
        assert len(places) == 1
        assert held[0].weight.untyped_storage().nbytes() == sum(each.weight.nbytes for each in held)


def test_calls_of_another_kind_are_the_modules_own() -> None:
    """Over a backend that takes no joint product, and in several rows of a batch."""
    model = tiny_model("qwen3")
    expected = reference_logits(model)
    shapes = attach_attention(model)
    fuse(model)
    needs = AttentionNeeds.of(model, shapes, "fast", BLOCK_SIZE)
    check_logits(ModelRunner(model, build_attention(needs, 97, "sdpa")), expected)


def test_what_computes_something_else_stays_as_it_is() -> None:
    model = tiny_model("llama")
    layers: Any = model.get_decoder().layers
    layers[0].self_attn.register_forward_hook(lambda _, __, output: (output[0] * 2, output[1]))
    layers[1].mlp.act_fn = nn.GELU()
    served(model)
    assert kinds(model) == {FusedNorm: 5, FusedAttention: 1, GatedRows: 1, FusedLayer: 1}


def test_queries_that_grow_down_a_text_are_the_modules_own() -> None:
    """Ministral 3's do from position 16384 on."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Ministral3Config(**sizes, **heads, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    served(model)
    assert kinds(model) == {FusedNorm: 5, FusedAttention: 0, GatedRows: 2, FusedLayer: 0}


def test_hidden_states_between_layers_are_sums() -> None:
    model = tiny_model("llama")
    text = random_ids(1, 9)
    batch = build_batch([chunk(text, 0, 9, range(12))], BLOCK_SIZE, (0, 1, 2))
    wanted = plain(model).forward(batch).hidden
    torch.testing.assert_close(served(model).forward(batch).hidden, wanted, rtol=1e-4, atol=1e-4)


def test_graphs_repeat_steps_in_few_launches() -> None:
    model, maker = tiny_model("qwen3"), ReplayingMaker()
    wanted = written(plain(model))
    runner = served(model)
    sizes = GraphSizes(8, 2, 64, 4)
    runner._replays = DeviceGraphs(runner._planned, runner.attention, maker, sizes, None)
    runner.prepare()
    torch.testing.assert_close(written(runner), wanted, rtol=1e-4, atol=1e-4)
    assert maker.num_replays == 2


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_adapters_change_the_parts_of_joint_products(determinism: Determinism) -> None:
    model = tiny_model("llama")
    merged = copy.deepcopy(model)
    runner, text = served(model, determinism), random_ids(1, 12)
    layers = runner.serve_adapters()
    parts = adapter_of(layers)
    for name, (first, second) in parts.items():
        merged.get_submodule(name).weight.data += second @ first  # type: ignore[operator, union-attr]
    rows = [chunk(text, 0, 12, scattered_table(at, 12, first=24 * at)) for at in (0, 1)]
    alone = run_together(runner, [rows[1]])[0]
    rows[0].adapter = layers.pack(parts)
    got, beside = run_together(runner, rows)
    table = scattered_table(0, 12)
    (expected,) = run_together(plain(merged), [chunk(text, 0, 12, table)])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    if determinism == "exact":
        assert torch.equal(beside, alone)


def test_adapters_change_quantized_layers_as_they_do_unfused() -> None:
    text, found = random_ids(1, 12), []
    for is_fused in (True, False):
        runner = served(quantized("llama", torch.float32), is_fused=is_fused)
        layers = runner.serve_adapters()
        rows = [chunk(text, 0, 12, scattered_table(at, 12, first=24 * at)) for at in (0, 1)]
        rows[0].adapter = layers.pack(adapter_of(layers))
        found.append(run_together(runner, rows))
    assert not torch.allclose(found[0][0], found[0][1], atol=0.1)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
