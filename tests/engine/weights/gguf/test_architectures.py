"""Every architecture of GGUF files that is read: a tiny model written as llama.cpp's conversion writes it
is read as the model that it was written from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.census import asked
from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.experts import GgufExperts
from engine.weights.gguf.architecture import Architecture
from engine.weights.gguf.architectures import ARCHITECTURES
from engine.weights.gguf.blocks import GgufEmbedding, GgufWeight
from engine.weights.gguf.loading import load_gguf, read_config
from worlds.gguf_conversion import random_model, write_converted
from worlds.gguf_files import LLAMA3, meant, tiny_llama, values_of, write_gguf

IDS = torch.tensor([[5, 20, 31, 77, 14, 9, 9, 60, 3, 88, 41, 7]])


class Case(NamedTuple):
    architecture: str
    model_type: str
    changes: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return f"{self.architecture}-{self.model_type}"


WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
FULL = ["full_attention"] * 4
SPARSE = ["dense"] + ["sparse"] * 3
RECURRENT = ["linear_attention", "full_attention"] * 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
IN_SECTIONS = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3],
}
SCALES = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.25,
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
MSCALES = dict.fromkeys(("long_mscale", "short_mscale"), 1.243163121016122)
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
MIXED = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
CASES = [
    Case("afmoe", "afmoe", {"mup_enabled": True, "layer_types": WINDOWS}),
    Case("apertus", "apertus"),
    Case("arcee", "arcee"),
    Case("chatglm", "glm"),
    Case("cohere2", "cohere2", {"layer_types": WINDOWS}),
    Case("command-r", "cohere"),
    Case("deepseek2", "deepseek_v2"),
    Case("deepseek2", "deepseek_v2", GROUPED),
    Case("deepseek2", "deepseek_v3"),
    Case("dots1", "dots1"),
    Case("ernie4_5", "ernie4_5"),
    Case("ernie4_5-moe", "ernie4_5_moe"),
    Case("exaone", "llama", {"rope_parameters": LLAMA3}),
    Case("exaone-moe", "exaone_moe", {"mlp_layer_types": SPARSE}),
    Case("exaone4", "exaone4"),
    Case("falcon", "falcon"),
    Case("falcon-h1", "falcon_h1"),
    Case("gemma", "gemma"),
    Case("gemma2", "gemma2", {"query_pre_attn_scalar": 16}),
    Case(
        "gemma3",
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 4},
    ),
    Case("gemma3n", "gemma3n_text", {"activation_sparsity_pattern": [0.9] * 2 + [0.0] * 4}),
    Case("gemma4", "gemma4_text", {"num_experts": None}),
    Case("gemma4", "gemma4_text", MIXED),
    Case("glm4", "glm4"),
    Case("glm4", "glm4", {"rope_parameters": IN_SECTIONS}),
    Case("glm4moe", "glm4_moe"),
    Case("gpt-oss", "gpt_oss"),
    Case("gpt2", "gpt2"),
    Case("gptneox", "gpt_neox"),
    Case("granite", "granite", {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}),
    Case("granitehybrid", "granitemoehybrid", {"layer_types": RECURRENT}),
    Case("granitehybrid", "granitemoehybrid", {"layer_types": RECURRENT, "num_local_experts": 0}),
    Case("granitemoe", "granitemoe", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    Case("granitemoe", "granitemoeshared"),
    Case("hunyuan-dense", "hunyuan_v1_dense"),
    Case("hunyuan-moe", "hunyuan_v1_moe"),
    Case("internlm2", "llama"),
    Case("jais2", "jais2"),
    Case("jamba", "jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    Case("jamba", "jamba", {"expert_layer_period": 5, "attn_layer_offset": 2, "num_experts": 1}),
    Case("kimi-linear", "kimi_linear", {"mlp_layer_types": SPARSE, "linear_num_heads": 4}),
    Case("lfm2", "lfm2", {"block_auto_adjust_ff_dim": False}),
    Case("lfm2moe", "lfm2_moe"),
    Case("llama", "llama", {"rope_parameters": YARN}),
    Case("llama", "mixtral"),
    Case("llama4", "llama4_text", {"interleave_moe_layer_step": 2, "moe_layers": [1, 3]}),
    Case("mamba", "falcon_mamba"),
    Case("mamba", "mamba"),
    Case("mamba2", "mamba2"),
    Case("minicpm", "granite", SCALES),
    Case("minicpm3", "minicpm3"),
    Case("minimax-m2", "minimax_m2"),
    Case("mistral3", "ministral3"),
    Case("nemotron", "nemotron"),
    Case("nemotron_h", "nemotron_h", {"layers_block_type": [*RECURRENT[:3], "mlp"]}),
    Case("nemotron_h_moe", "nemotron_h", {"layers_block_type": [*RECURRENT[:3], "moe"]}),
    Case("olmo", "olmo", {"clip_qkv": 0.5}),
    Case("olmo2", "olmo2"),
    Case("olmo2", "olmo3"),
    Case("olmoe", "olmoe"),
    Case("phi2", "phi"),
    Case("phi3", "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    Case("phimoe", "phimoe"),
    Case("phimoe", "phimoe", {"rope_parameters": LONG | MSCALES}),
    Case("phimoe", "phimoe", {"attention_bias": True, "lm_head_bias": True}),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen2moe", "qwen2_moe"),
    Case("qwen3", "qwen3"),
    Case("qwen35", "qwen3_5_text"),
    Case("qwen35moe", "qwen3_5_moe_text"),
    Case("qwen3moe", "qwen3_moe", {"norm_topk_prob": True}),
    Case("qwen2vl", "qwen2"),
    Case("qwen3vl", "qwen3"),
    Case("qwen3vlmoe", "qwen3_moe", {"norm_topk_prob": True}),
    Case("qwen3next", "qwen3_next"),
    Case("seed_oss", "seed_oss"),
    Case("smollm3", "smollm3"),
    Case("stablelm", "stablelm"),
    Case("starcoder", "gpt_bigcode"),
    Case("starcoder2", "starcoder2"),
]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS, use_cache=False).logits
    return found


def read(path: Path, packed: bool = True) -> PreTrainedModel:
    return load_gguf(path, *read_config(path), torch.float32, packed)


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES} == ARCHITECTURES.keys()


def test_the_page_lists_every_architecture() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "gguf.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    (same,) = re.findall(r"type of the same name: (.*?)\. As", page, re.DOTALL)
    listed |= {name: name for name in re.findall("`([^`]+)`", same)}
    assert listed == {name: each.model_type for name, each in ARCHITECTURES.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_is_the_model_that_it_was_written_from(tmp_path: Path, case: Case) -> None:
    model = random_model(case.model_type, **case.changes)
    path = write_converted(tmp_path / "tiny.gguf", case.architecture, model)
    expected = logits(model)
    torch.testing.assert_close(logits(read(path)), expected, rtol=1e-4, atol=2e-5)
    assert float(expected.std()) > 0.01


WIDTHS: list[tuple[str, dict[str, int]]] = [
    *((name, {"head_dim": 32}) for name in ("qwen3moe", "glm4moe", "dots1", "granite", "lfm2")),
    ("qwen3moe", {"moe_intermediate_size": 96}),
]


@pytest.mark.parametrize(("architecture", "width"), WIDTHS)
def test_heads_and_experts_are_as_wide_as_a_file_says(
    tmp_path: Path, architecture: str, width: dict[str, int]
) -> None:
    """As heads of Qwen3 30B-A3B and GLM-4.5, whose classes of configurations have no word for it."""
    case = next(each for each in CASES if each.architecture == architecture)
    model = random_model(case.model_type, **case.changes | width)
    assert model.config.hidden_size // model.config.num_attention_heads != 32
    path = write_converted(tmp_path / "tiny.gguf", architecture, model)
    assert torch.equal(logits(read(path)), logits(model))


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
UNSAID = [
    (
        Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": FULL}),
        {"exaone4.attention.sliding_window_pattern": None},
    ),
    (Case("chatglm", "glm", {"head_dim": 16}), {"chatglm.attention.key_length": None}),
    (
        Case("llama4", "llama4_text", {"layer_types": FULL, "no_rope_layers": [1] * 4}),
        {"llama4.attention.sliding_window": 0},
    ),
    (
        Case("minicpm", "granite", SCALES),
        dict.fromkeys(f"minicpm.{each}_scale" for each in ("embedding", "residual", "logit")),
    ),
    (Case("mistral3", "mistral", {"sliding_window": None}), {}),
    (Case("mistral3", "mistral", {"sliding_window": None, "rope_parameters": YARN | MSCALE}), {}),
    (Case("olmo", "olmo"), {"olmo.attention.layer_norm_epsilon": 1e-5}),
    (Case("olmo2", "olmo3"), {"olmo2.rope.freq_base_swa": None}),
    (
        Case("deepseek2", "deepseek_v3", {"n_group": 1, "topk_group": 1}),
        {"deepseek2.expert_group_count": None, "deepseek2.expert_group_used_count": None},
    ),
    (
        Case("qwen35", "qwen3_5_text", {"layer_types": [*reversed(RECURRENT)]}),
        {"qwen35.attention.recurrent_layers": [False, True] * 2},
    ),
    (Case("llama", "llama", {"rope_parameters": LINEAR}), {"llama.rope.scaling.type": None}),
    (
        Case("llama", "llama", {"rope_parameters": LINEAR}),
        {
            "llama.rope.scaling.type": None,
            "llama.rope.scaling.factor": None,
            "llama.rope.scale_linear": 4.0,
        },
    ),
]
"""Files that leave something unsaid, or say it as older ones do."""


@pytest.mark.parametrize(("case", "values"), UNSAID)
def test_what_a_file_leaves_unsaid_is_as_llama_cpp_has_it(
    tmp_path: Path, case: Case, values: dict[str, Any]
) -> None:
    model = random_model(case.model_type, **case.changes)
    path = write_converted(tmp_path / "tiny.gguf", case.architecture, model, values=values)
    found = read(path)
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-4, atol=2e-5)
    window = getattr(model.config, "sliding_window", None)
    assert getattr(found.config, "sliding_window", None) == window


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("deepseek2", "deepseek_v3"), ("ernie4_5-moe", "ernie4_5_moe"), ("lfm2moe", "lfm2_moe")],
)
def test_parameters_have_the_types_that_a_checkpoint_gives_them(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    """Routers' biases say little beside their size: of 16 bits nothing would be left."""
    model = random_model(model_type)
    for name, values in model.state_dict().items():
        if "correction_bias" in name or "expert_bias" in name:
            values += 4
    model.save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    path = write_converted(tmp_path / "tiny.gguf", architecture, model)
    found = load_gguf(path, *read_config(path), torch.bfloat16, packed=False).state_dict()
    assert {name: each.dtype for name, each in found.items()} == {
        name: each.dtype for name, each in expected.items()
    }
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def whole_projections(layer: int, each: Any, tensors: dict[str, Any]) -> None:
    """Qwen3-Next's was cut into two tensors later."""
    if tensors.pop(f"blk.{layer}.attn_gate.weight", None) is not None:
        del tensors[f"blk.{layer}.attn_qkv.weight"]
        own = each.linear_attn.in_proj_qkvz.weight
        tensors[f"blk.{layer}.ssm_in.weight"] = own.detach().numpy()


def keys_with_values(layer: int, each: Any, tensors: dict[str, Any]) -> None:
    """Of latent attention, in one tensor."""
    own = each.self_attn.kv_b_proj.weight
    tensors[f"blk.{layer}.attn_kv_b.weight"] = own.detach().numpy()
    for which in "kv":
        del tensors[f"blk.{layer}.attn_{which}_b.weight"]


@pytest.mark.parametrize(
    ("architecture", "model_type", "as_before"),
    [
        ("qwen3next", "qwen3_next", whole_projections),
        ("deepseek2", "deepseek_v2", keys_with_values),
    ],
)
def test_older_files_have_tensors_that_were_cut_in_two_later(
    tmp_path: Path, architecture: str, model_type: str, as_before: Callable[..., None]
) -> None:
    """Those of latent attention say sizes of heads alone."""
    model = random_model(model_type)

    def change(tensors: dict[str, Any]) -> None:
        for layer, each in enumerate(model.base_model.layers):
            as_before(layer, each, tensors)

    values, config = {}, model.config
    if architecture == "deepseek2":
        sizes = {
            "key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "value_length": config.v_head_dim,
            "key_length_mla": 0,
        }
        values = {f"deepseek2.attention.{name}": size for name, size in sizes.items()}
    path = write_converted(
        tmp_path / "tiny.gguf", architecture, model, values=values, change_tensors=change
    )
    torch.testing.assert_close(logits(read(path)), logits(model), rtol=1e-4, atol=2e-5)


def plain(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters as values, whatever their places hold."""
    found = meant(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GgufExperts):
            found |= {f"{name}.{own}": values for own, values in products(module).items()}
    return found


def products(module: GgufExperts) -> dict[str, torch.Tensor]:
    """The parameters that the model's own module would have."""
    own: Any = vars(module)["own"]
    weights = module.weights()
    found = {
        name: torch.stack(
            [product.dequantized(each, torch.float32) for each in range(module.num_experts)]
        )
        for name, product in weights.items()
    }
    biases = {name: product.bias for name, product in weights.items() if product.bias is not None}
    for several in (found, biases):
        if "gate_proj" in several:
            several["gate_up_proj"] = torch.cat(
                [several.pop("gate_proj"), several.pop("up_proj")], 1
            )
        if own.has_gate and not own.is_concatenated:
            several["gate_up_proj"] = interleaved(several["gate_up_proj"])
    if own.is_transposed:
        found = {name: values.mT for name, values in found.items()}
    return found | {f"{name}_bias": values for name, values in biases.items()}


def interleaved(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def test_gates_may_lie_beside_what_they_gate(tmp_path: Path) -> None:
    """llama.cpp's conversion does so when it is told to."""
    model = random_model("qwen3_moe", norm_topk_prob=True)

    def fused(tensors: dict[str, Any]) -> None:
        for layer in range(model.config.num_hidden_layers):
            parts = [tensors.pop(f"blk.{layer}.ffn_{each}_exps.weight") for each in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)

    whole, apart = tmp_path / "whole.gguf", tmp_path / "apart.gguf"
    write_converted(whole, "qwen3moe", model, Kind.Q8_0, change_tensors=fused)
    write_converted(apart, "qwen3moe", model, Kind.Q8_0)
    found, expected = read(whole), plain(read(apart))
    assert sum(isinstance(each, GgufExperts) for each in found.modules()) == 4
    assert all(torch.equal(each, expected[name]) for name, each in plain(found).items())


_HYBRIDS = ("granitehybrid",)
PACKED = {
    "llama": 30,  # queries and keys in another order
    "glm4": 26,
    "granitehybrid": 22,  # a projection of two tensors
    "qwen3next": 26 + 4,
    "qwen35": 28,  # value heads in another order
    "falcon-h1": 38,
    "gpt-oss": 18 + 4,  # gates in turn, with biases
    "qwen3moe": 18 + 4,
    "nemotron_h_moe": 12 + 1,  # without gates
}


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.architecture in PACKED and case.model_type != "mixtral"],
    ids=lambda case: case.name,
)
def test_blocks_are_in_the_order_of_the_model(tmp_path: Path, case: Case) -> None:
    model = random_model(case.model_type, **case.changes)
    path = write_converted(tmp_path / "tiny.gguf", case.architecture, model, Kind.Q8_0)
    packed, whole = read(path), plain(read(path, packed=False))
    held = {name: each for name, each in plain(packed).items() if name in whole}
    assert held.keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in whole)
    own = model.state_dict()
    for name, values in whole.items():
        bound = float(own[name].abs().max()) / 100 + 1e-6
        assert float((values - own[name]).abs().max()) < bound, name
    kinds = GgufWeight | GgufEmbedding | GgufExperts
    places = [each for each in packed.modules() if isinstance(each, kinds)]
    has_more = getattr(model.config, "num_local_experts", None) and case.architecture in _HYBRIDS
    assert len(places) == PACKED[case.architecture] + (4 if has_more else 0)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("granitehybrid", Kind.Q8_0),
        pytest.param("qwen35", Kind.Q8_0, marks=pytest.mark.slow),
        pytest.param("lfm2moe", Kind.Q4_0, marks=pytest.mark.slow),
    ],
)
def test_drafts_on_hybrids_change_no_text(tmp_path: Path, architecture: str, kind: Kind) -> None:
    case = next(case for case in CASES if case.architecture == architecture)
    model = random_model(case.model_type, **case.changes)
    path = write_converted(tmp_path / "tiny.gguf", architecture, model, kind)
    loaded = load_model(str(path), torch.device("cpu"), "float32")
    assert loaded.generation_config is not None
    loaded.generation_config.eos_token_id = loaded.config.eos_token_id = None
    found = asked(case.model_type, loaded)
    assert (found.is_served, found.exact, found.reason) == (True, True, "")
    assert found.sampled
    assert found.greedy in (True, None)


@pytest.mark.parametrize(
    ("name", "model_type", "part"),
    [
        ("xverse", "xverse", "'xverse' is of the type 'xverse', which transformers does not have"),
        ("abacus", "llama", "gguf has no names of tensors for architecture 'abacus'"),
    ],
)
def test_entries_that_nothing_is_known_of_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, model_type: str, part: str
) -> None:
    monkeypatch.setitem(ARCHITECTURES, name, Architecture(model_type))
    own = {key.replace("llama.", f"{name}."): each for key, each in values_of(tiny_llama()).items()}
    path = write_gguf(tmp_path / "tiny.gguf", values={**own, "general.architecture": name})
    with pytest.raises(UnsupportedModelError, match=part):
        load_model(str(path), torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "key", "value", "part"),
    [
        ("afmoe", "expert_weights_norm", False, "its expert_weights_norm is False"),
        ("deepseek2", "attention.temperature_scale", 0.1, "attention.temperature_scale"),
        ("qwen3", "attention.causal", False, "its attention.causal is False"),
        ("qwen3", "residual_scale", 0.5, "its residual_scale is 0.5"),
        ("qwen3", "final_logit_softcapping", 30.0, "its final_logit_softcapping is 30.0"),
        # Sizes that are not the tensors'.
        ("qwen3moe", "expert_feed_forward_length", 40, "other shapes than the configuration says"),
        ("qwen3moe", "expert_count", 7, "other shapes than the configuration says"),
        ("qwen3moe", "expert_count", 0.5, "its qwen3moe.expert_count is 0.5"),
        ("qwen3moe", "feed_forward_length", [8, 9, 9, 9], "several values of feed_forward_length"),
        ("qwen3moe", "rope.dimension_count", 6, "turns 6 dimensions"),
        ("qwen3moe", "attention.head_count_kv", [2, 2], "2 values, for 4 layers"),
        ("qwen3moe", "attention.layer_norm_rms_epsilon", "x", "epsilon is 'x'"),
    ],
)
def test_what_a_type_cannot_compute_is_refused(
    tmp_path: Path, architecture: str, key: str, value: Any, part: str
) -> None:
    values = {f"{architecture}.{key}": value}
    model = random_model(ARCHITECTURES[architecture].model_type)
    path = write_converted(tmp_path / "tiny.gguf", architecture, model, values=values)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(path), torch.device("cpu"))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
