"""Passes over rows: modules are found by what they do, and models write what they wrote. Bits of
most passes are the kernels' own."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama import modeling_llama

from engine.attention.backend import AttentionNeeds, build_attention
from engine.kernels import rotary as kernel
from engine.kernels.packing import pack
from engine.kernels.triton.row_ops import row_norm
from engine.model import fused as kinds
from engine.model import fusing
from engine.model import linear as linear_module
from engine.model.fused import Fused, FusedNorm, fused_forward, is_near, row_norm_for
from engine.model.fusing import (
    FusedRotation,
    GatedFloats,
    GatedGroups,
    LookedUpAngles,
    fuse,
    rotated,
)
from engine.model.layers import GroupedLinear, PackedLinear
from engine.model.linear import pack_floats, pack_linears
from engine.model.loader import attach_attention
from engine.model.product import GroupedProduct, join_products
from engine.model.quantization import num_bytes, quantize_model
from engine.model.runner import ModelRunner
from engine.model.selfcheck import check_exact, check_logits, reference_logits
from engine.weights.rounding.int8 import is_exact, quantize_weight
from worlds.random_tensors import drawn
from worlds.tiny_models import BLOCK_SIZE, own_logits, random_ids, tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the logits' spread, on average: a step of the type here and there, after few and large layers.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
IDS = random_ids(3, 28)
needs_int8 = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
in_every_kind = pytest.mark.parametrize("kind", [pytest.param("int8", marks=needs_int8), "floats"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX, too."""
    monkeypatch.setattr(linear_module, "has_tiles", lambda: False)


def forwards(model: nn.Module, *kinds: type) -> list[Any]:
    """Returns the replacements of its modules' forwards."""
    every = map(fused_forward, model.modules())
    return [each for each in every if isinstance(each, kinds)]


def gatings(model: nn.Module) -> list[Any]:
    return forwards(model, GatedGroups, GatedFloats)


def said(caplog: pytest.LogCaptureFixture, model: nn.Module) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger=fusing.__name__):
        fuse(model)
    return [each.getMessage() for each in caplog.records]


# --- cosines and sines ---


@every_dtype
@pytest.mark.parametrize("rope", [{}, {"rope_type": "llama3", "factor": 8.0}])
def test_cosines_and_sines_are_looked_up(dtype: torch.dtype, rope: dict[str, Any]) -> None:
    if rope:
        rope |= {
            "rope_theta": 10000.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        rope = {"rope_parameters": rope}
    model = tiny_model("llama", dtype, head_dim=32, **rope)
    embedding: Any = model.get_decoder().rotary_emb
    plain = copy.deepcopy(embedding)
    with torch.inference_mode():
        fuse(model, 2000)
        assert [embedding.forward] == forwards(model, LookedUpAngles)
        rows = torch.zeros(1, 70, 8, dtype=dtype)
        positions = torch.randint(0, 2000, (1, 70), generator=torch.Generator().manual_seed(1))
        for got, expected in zip(embedding(rows, positions), plain(rows, positions), strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert (got.float() - expected.float()).abs().max() <= TOLERANCE[dtype]
        # One and the same row, whoever is beside it.
        alone = embedding(rows[:, :1], positions[:, 7:8])[0]
        assert torch.equal(alone, embedding(rows, positions)[0][:, 7:8])


def test_other_rows_and_positions_are_computed() -> None:
    model = tiny_model("llama", head_dim=32)
    embedding: Any = model.get_decoder().rotary_emb
    plain = copy.deepcopy(embedding)
    fuse(model, 64)
    several = torch.arange(12).view(2, 6)
    for rows, positions in (
        (torch.zeros(2, 6, 8), several),
        (torch.zeros(1, 6, 8, dtype=torch.bfloat16), several[:1]),
    ):
        for got, expected in zip(embedding(rows, positions), plain(rows, positions), strict=True):
            assert torch.equal(got, expected)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("num_positions", "changes"),
    [
        (None, {}),
        (1 << 22, {}),
        (64, {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}),
    ],
    ids=["no end", "a far end", "frequencies that depend on the call"],
)
def test_nothing_is_looked_up_where_tables_would_be_long_or_wrong(
    num_positions: int | None, changes: dict[str, Any]
) -> None:
    model = tiny_model("llama", head_dim=32, **changes)
    fuse(model, num_positions)
    assert not forwards(model, LookedUpAngles)


# --- whole models ---


@every_dtype
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral"])
def test_logits_stay_what_they_are_within_a_step(name: str, dtype: torch.dtype) -> None:
    wide = {"head_dim": 32} | ({"hidden_size": 128} if name == "phi3" else {})
    model = tiny_model(name, dtype, **wide)
    expected = own_logits(model, IDS).float()
    fuse(model)
    got = own_logits(model, IDS).float()
    assert forwards(model, FusedNorm)
    assert (got - expected).abs().mean() < TOLERANCE[dtype] * expected.std()


@needs_int8
def test_what_was_found_is_said_and_a_second_time_there_is_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama", head_dim=32)
    plain = copy.deepcopy(model)
    quantize_model(model)
    expected = "in one pass each: 5 norms, 2 rotary embeddings"
    assert said(caplog, model) == [f"{expected}, 2 gated networks"]
    assert said(caplog, plain) == [expected]
    before, logits = [vars(each).get("forward") for each in model.modules()], own_logits(model, IDS)
    assert said(caplog, model) == ["in one pass each: nothing"]
    assert [vars(each).get("forward") for each in model.modules()] == before
    assert torch.equal(own_logits(model, IDS), logits)
    elsewhere = tiny_model("llama", head_dim=32).to("meta")
    assert said(caplog, elsewhere) == []
    assert not forwards(elsewhere, Fused)


@needs_int8
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mistral", "deepseek_v3"])
def test_rows_of_a_model_keep_their_bits_however_they_are_cut(name: str) -> None:
    changes = {} if name == "deepseek_v3" else {"head_dim": 32}
    model = tiny_model(name, **changes)
    quantize_model(model)
    fuse(model)
    reference = reference_logits(model)
    shapes = attach_attention(model)
    pack_linears(model, 64, exact=True)
    needs = AttentionNeeds.of(model, shapes, "exact", BLOCK_SIZE)
    runner = ModelRunner(model, build_attention(needs, 24))
    assert gatings(model)
    check_logits(runner, reference)
    assert check_exact(runner)


def test_models_of_the_same_class_stay_as_they_are_and_copies_are_their_own() -> None:
    forward = modeling_llama.LlamaAttention.forward
    model, neighbour = tiny_model("llama", head_dim=32), tiny_model("llama", head_dim=32)
    fuse(model)
    assert modeling_llama.LlamaAttention.forward is forward
    names = inspect.unwrap(forward).__globals__
    assert names["apply_rotary_pos_emb"] is modeling_llama.apply_rotary_pos_emb
    assert not forwards(neighbour, Fused)
    assert len(forwards(model, FusedRotation)) == 2
    expected = own_logits(model, IDS)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(own_logits(twin, IDS), expected)


# --- norms ---


@pytest.mark.parametrize(
    ("dtype", "is_triton"),
    [*((dtype, False) for dtype in DTYPES), (torch.float32, True), (torch.float16, True)],
)
@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("gemma2", 1.0)])
def test_norms_of_a_model_are_found_and_write_the_same(
    name: str, offset: float, dtype: torch.dtype, is_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's program is one of the ways; its interpreter does not round bfloat16 to the nearest."""
    if is_triton:
        monkeypatch.setattr(kinds, "row_norm_for", lambda *_: row_norm)
    model = tiny_model(name, dtype)
    expected = own_logits(model, IDS).float()
    named = [each for each in model.modules() if type(each).__name__.endswith("RMSNorm")]
    fuse(model)
    found = forwards(model, FusedNorm)
    assert len(found) == len(named) > 0
    assert {each.offset for each in found} == {offset}
    if dtype != torch.float32:
        assert {each.is_rounded for each in found} == {name == "llama"}
    error = (own_logits(model, IDS).float() - expected).abs().mean()
    assert error < TOLERANCE[dtype] * expected.std()


@every_dtype
def test_a_norms_row_has_the_same_bits_alone_and_among_any_others(dtype: torch.dtype) -> None:
    compute = row_norm_for(torch.device("cpu"), 1040)
    assert compute is not None
    norm = FusedNorm(torch.randn(1040).to(dtype), 1e-6, 0.0, True, compute)
    rows = torch.randn(1, 100, 1040).to(dtype)
    every = norm(rows)
    for row in (0, 1, 57, 99):
        assert torch.equal(norm(rows[:, row : row + 1])[0, 0], every[0, row])
    spread = rows.transpose(0, 1).expand(100, 3, 1040)
    assert torch.equal(norm(spread)[:, 2], every[0])


class Other(nn.Module):
    """A weight and an epsilon, but no such norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


class WithGate(Other):
    def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rows * gate


def test_what_is_no_such_norm_stays_as_it_is() -> None:
    others = [Other(), WithGate(), nn.LayerNorm(32), nn.LayerNorm(32, bias=False)]
    norms = [nn.RMSNorm(24, 1e-6), nn.RMSNorm(32, 1e-6)]  # of which one has no whole lanes
    model = nn.Sequential(*others, *norms)
    fuse(model)
    assert [fused_forward(each) is not None for each in model] == [False] * 5 + [True]


# --- rotary position embeddings ---


@every_dtype
@pytest.mark.parametrize(
    ("name", "changes", "takes"),
    [
        ("llama", {"head_dim": 32}, True),
        ("llama", {"head_dim": 64, "num_key_value_heads": 1}, True),
        ("qwen2", {"head_dim": 32}, True),
        ("qwen3", {"head_dim": 32}, True),
        ("mistral", {"head_dim": 64}, True),
        ("gemma2", {"head_dim": 32}, True),
        ("phi3", {"head_dim": 64, "hidden_size": 256}, True),
        ("qwen3_moe", {"head_dim": 32}, True),
        # What the kernel does not take is still the function's.
        ("llama", {"head_dim": 16}, False),
        ("phi3", {"head_dim": 64, "hidden_size": 256, "partial_rotary_factor": 0.5}, False),
        ("deepseek_v3", {}, False),
    ],
)
def test_rotated_logits_keep_their_bits(
    name: str,
    changes: dict[str, Any],
    takes: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kinds, "row_norm_for", lambda *_: None)
    model = tiny_model(name, dtype, **changes)
    expected = own_logits(model, IDS)
    fuse(model)
    assert len(forwards(model, FusedRotation)) == model.config.num_hidden_layers
    taken: list[bool] = []
    decide = kernel.can_rotate

    def noted(*parts: torch.Tensor) -> bool:
        taken.append(decide(*parts))
        return taken[-1]

    monkeypatch.setattr(kernel, "can_rotate", noted)
    assert torch.equal(own_logits(model, IDS), expected)
    assert {*taken} <= {takes}
    assert taken or not takes


def passing_on(function: Callable[..., Any]) -> Any:
    @wraps(function)
    def passed(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return passed


class Decorated(modeling_llama.LlamaAttention):
    forward = passing_on(passing_on(inspect.unwrap(modeling_llama.LlamaAttention.forward)))


def test_rotations_are_found_in_decorated_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers decorates those whose arguments it has renamed."""
    monkeypatch.setattr(kinds, "row_norm_for", lambda *_: None)
    model = tiny_model("llama", torch.float32, head_dim=32)
    for layer in cast(Any, model).model.layers:
        layer.self_attn.__class__ = Decorated
    expected = own_logits(model, IDS)
    fuse(model)
    assert len(forwards(model, FusedRotation)) == model.config.num_hidden_layers
    monkeypatch.setattr(modeling_llama, "rotate_half", None)
    assert torch.equal(own_logits(model, IDS), expected)


def test_what_is_said_of_other_dimensions_batches_and_types_is_the_functions() -> None:
    asked = []

    def function(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        asked.append(q)
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    rotation = partial(rotated, function)
    query, key = torch.randn(1, 4, 6, 64), torch.randn(1, 2, 6, 64)
    cos, sin = torch.randn(2, 1, 6, 64)
    rotation(query, key, cos, sin)
    assert not asked
    given: list[Any] = [
        [(query, key, cos, sin), {"unsqueeze_dim": 1}],
        [(query, key, cos, sin, 1), {}],
        [(query.transpose(1, 2), key.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}],
        [(query, key), {"cos": cos, "sin": sin}],
        [(query[..., :48], key[..., :48], cos[..., :48], sin[..., :48]), {}],
    ]
    for positional, named in given:
        expected = modeling_llama.apply_rotary_pos_emb(*positional, **named)
        got = rotation(*positional, **named)
        assert asked.pop() is positional[0]
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """As transformers', except that keys turn the other way."""
    mine = modeling_llama.apply_rotary_pos_emb
    return mine(q, k, cos, sin)[0], mine(q, k, cos, -sin)[1]


class TurnsBack(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin)


class Twists(modeling_llama.LlamaAttention):
    """With a forward of its own already."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, 0)
        self.forward = super().forward


def test_other_rotations_are_left_alone() -> None:
    """Also one of interleaved pairs."""
    helium = hf.HeliumConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, pad_token_id=0,
    )  # fmt: skip
    twists = Twists(hf.LlamaConfig(hidden_size=64, num_attention_heads=2))
    for model in (TurnsBack(), twists, hf.AutoModelForCausalLM.from_config(helium)):
        fuse(model)
        assert not forwards(model, FusedRotation)


# --- gated networks ---


def ready(name: str, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose layers are of a kind."""
    model = tiny_model(name, dtype, intermediate_size=128)
    if kind == "int8":
        quantize_model(model)
    else:
        pack_linears(model, 64, exact=False)
    return model


@every_dtype
@in_every_kind
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_networks_of_a_model_are_found_and_write_the_same(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    model = ready(name, kind, dtype)
    expected, held = own_logits(model, IDS).float(), num_bytes(model)
    fuse(model)
    assert len(gatings(model)) == model.config.num_hidden_layers
    assert num_bytes(model) == held
    error = (own_logits(model, IDS).float() - expected).abs().mean()
    assert error < (2e-3 + TOLERANCE[dtype]) * expected.std()


@needs_int8
@pytest.mark.parametrize("name", ["phi3", "deepseek_v3"])
def test_joint_layers_and_shared_experts_are_found_too(name: str) -> None:
    """The dense layer and the experts beside the routed ones are both found."""
    model = ready(name, "int8")
    expected = own_logits(model, IDS)
    fuse(model)
    assert len(gatings(model)) == 2
    torch.testing.assert_close(own_logits(model, IDS), expected, rtol=0.05, atol=0.05)


@needs_int8
def test_models_that_have_none_stay_as_they_are() -> None:
    for model in (tiny_model("llama"), ready("gpt2", "int8")):  # torch's own layers; no gate
        fuse(model)
        assert not gatings(model)


class Network(nn.Module):
    """A gated network of one kind of layers; in 8 bits gate and up are one product. ``compute`` takes the
    network and rows."""

    def __init__(
        self,
        kind: str,
        compute: Callable[[Any, torch.Tensor], torch.Tensor],
        activation: nn.Module,
        dtype: torch.dtype = torch.float32,
        *,
        scale: float = 0.1,
        is_gate_last: bool = False,
        width: int = 128,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        halves = [scale * drawn(width, 64, seed=seed) for seed in (1, 2)]
        biases = [drawn(width, seed=seed).to(dtype) if has_bias else None for seed in (3, 4)]
        make = _in_8_bits if kind == "int8" else _of_floats
        # Declared in no order that says anything.
        (self.down,) = make([drawn(64, width, seed=5)], [None], dtype)
        first, second = make(halves, biases, dtype)
        self.gate, self.up = (second, first) if is_gate_last else (first, second)
        self.activation = activation
        self._compute = compute

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._compute(self, rows)


def _in_8_bits(weights: list[torch.Tensor], biases: list[Any], dtype: torch.dtype) -> list[Any]:
    size = len(weights[0])
    packed = [
        pack([quantize_weight(weight)], *weight.shape, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    product = join_products([GroupedProduct(each, dtype) for each in packed])
    return [GroupedLinear(product, size, "", "", size * at) for at in range(len(weights))]


def _of_floats(weights: list[torch.Tensor], biases: list[Any], dtype: torch.dtype) -> list[Any]:
    return [
        PackedLinear(weight.shape[1], weight.shape[0], pack_floats(weight.to(dtype), bias))
        for weight, bias in zip(weights, biases, strict=True)
    ]


def usual(net: Any, rows: torch.Tensor) -> torch.Tensor:
    return net.down(net.activation(net.gate(rows)) * net.up(rows))  # type: ignore[no-any-return]


def fused(network: nn.Module) -> Any:
    """The network, in two passes; None: it stayed as it was."""
    fuse(network)
    return None if fused_forward(network) is None else network


class Silu(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        exact = rows.float()
        return (exact * exact.sigmoid()).to(rows.dtype)


class Quick(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * (1.702 * rows).sigmoid()


class Learned(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))


class Pairs(nn.Module):
    def forward(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return rows * others


@every_dtype
@in_every_kind
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_gate_last", [False, True])
@pytest.mark.parametrize(
    "activation", [nn.SiLU(), Silu(), nn.GELU(approximate="tanh")], ids=["silu", "own", "gelu"]
)
def test_the_half_with_the_activation_is_told_from_the_other(
    activation: nn.Module, is_gate_last: bool, has_bias: bool, dtype: torch.dtype, kind: str
) -> None:
    network = Network(kind, usual, activation, dtype, is_gate_last=is_gate_last, has_bias=has_bias)
    # Gates far below and far above nothing, too.
    given = [drawn(2, 9, 64, seed=7).to(dtype), (40 * drawn(9, 64, seed=8)).to(dtype)]
    expected = [network(rows) for rows in given]
    found = fused(network)
    assert found is not None
    for rows, wanted in zip(given, expected, strict=True):
        assert is_near(found(rows), wanted)


@in_every_kind
@pytest.mark.parametrize(
    "activation",
    [nn.GELU(), nn.ReLU(), nn.Identity(), nn.Tanh(), Quick(), Learned(), Pairs(), nn.Softmax(-1)],
)
def test_other_activations_are_left_alone(activation: nn.Module, kind: str) -> None:
    compute = usual if not isinstance(activation, Pairs) else gates_by_itself
    assert fused(Network(kind, compute, activation)) is None


def gates_by_itself(net: Any, rows: torch.Tensor) -> torch.Tensor:
    return net.down(net.activation(net.gate(rows), net.up(rows)))  # type: ignore[no-any-return]


OTHERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "clamps": lambda net, x: net.down(net.activation(net.gate(x).clamp(max=7)) * net.up(x)),
    "clamps high": lambda net, x: net.down(net.activation(net.gate(x)) * net.up(x).clamp(-64, 64)),
    "scales": lambda net, x: 1.1 * usual(net, x),
    "scales the gate": lambda net, x: net.down(net.activation(1.1 * net.gate(x)) * net.up(x)),
    "adds": lambda net, x: usual(net, x) + x,
    "adds one": lambda net, x: net.down(net.activation(net.gate(x)) * (net.up(x) + 1)),
    "no gate": lambda net, x: net.down(net.activation(net.gate(x)) + net.up(x)),
    "twice": lambda net, x: net.down(net.activation(net.gate(x)) * net.activation(net.up(x))),
    "other type": lambda net, x: usual(net, x).double(),
    "a pair": lambda net, x: (usual(net, x), x),
    "raises": lambda net, x: net.nothing(x),
}


@in_every_kind
@pytest.mark.parametrize("scale", [0.002, 0.1, 2.0])
@pytest.mark.parametrize("name", OTHERS)
def test_networks_that_do_something_else_are_left_alone(name: str, scale: float, kind: str) -> None:
    assert fused(Network(kind, OTHERS[name], nn.SiLU(), scale=scale)) is None
    assert fused(Network(kind, usual, nn.SiLU(), scale=scale)) is not None


@in_every_kind
def test_sizes_and_parts_that_do_not_fit_are_left_alone(kind: str) -> None:
    """A width that is no whole number of the kernel's blocks; a part more; another kind of layer."""
    assert fused(Network(kind, usual, nn.SiLU(), width=72)) is None
    more = Network(kind, usual, nn.SiLU())
    more.dropout = nn.Dropout()
    assert fused(more) is None
    cut = Network(kind, usual, nn.SiLU())
    cut.down = nn.Linear(128, 64)
    assert fused(cut) is None


def test_weights_of_the_first_two_layers_are_not_kept_twice() -> None:
    network = Network("floats", usual, nn.SiLU())
    down = network.down
    assert list(fused(network).children()) == [down, network.activation]
