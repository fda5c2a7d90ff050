"""MTP modules of tiny checkpoints, as each family writes them, beside plain readings of the same tensors,
and transformers' own ``MtpModel`` where it knows the family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from engine.batch import NORMED
from engine.drafting.facts import target_facts
from engine.drafting.published.folder import DraftRefusedError
from engine.drafting.published.mtp import MtpNetwork, read_mtp
from engine.model.loader import load_model
from engine.model.text_half import find_text_half
from engine.weights.checkpoint import load_config, load_weights
from worlds.changed_folders import stored_tensors
from worlds.mtp_modules import (
    FAMILIES,
    HIDDEN,
    LAST,
    NUM_LAYERS,
    TEXT,
    Served,
    check_whole,
    donor,
    glm,
    own_model,
    own_parts,
    plainly,
    target_states,
)
from worlds.tiny_models import CPU, VOCAB_SIZE

Tensors = dict[str, torch.Tensor]


def module_tensors(name: str, scratch: Path) -> Tensors:
    """The module as its family's checkpoints have it."""
    family = FAMILIES[name]
    donor(name).save_pretrained(scratch)
    stored = load_file(scratch / "model.safetensors")
    start = "model.layers.0."
    found = {
        f"{family.root}{family.layer}{key.removeprefix(start)}": tensor
        for key, tensor in stored.items()
        if key.startswith(start)
    }
    last = stored["model.norm.weight"]
    parts = zip(family.parts, [*own_parts(), last], strict=True)
    return found | {f"{family.root}{part}.weight": tensor for part, tensor in parts}


def write(name: str, path: Path, change: Callable[[Tensors], object] = len) -> PreTrainedModel:
    """Writes a checkpoint with a module, whose tensors ``change`` may change; returns what an engine
    loads of it."""
    family = FAMILIES[name]
    own_model(family.config(num_hidden_layers=NUM_LAYERS), seed=0).save_pretrained(path)
    tensors = module_tensors(name, path / "scratch")
    change(tensors)
    with stored_tensors(path) as stored:
        stored.update(tensors)
    if family.is_served:
        return load_model(str(path), CPU)
    return hf.AutoModelForCausalLM.from_pretrained(path).eval()


def read(
    name: str, path: Path, change: Callable[[Tensors], object] = len
) -> tuple[MtpNetwork, PreTrainedModel]:
    target = write(name, path, change)
    return bound(target, path), target


def bound(target: PreTrainedModel, path: Path) -> MtpNetwork:
    network = read_mtp(target, path, target_facts(target))
    network.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return network


@pytest.mark.parametrize("name", FAMILIES)
def test_known_rows_in_chunks_and_later_steps_are_those_of_a_plain_reading(
    name: str, tmp_path: Path
) -> None:
    """Row i reads token i + 1 and the state of token i; a draft reads what the row before it wrote."""
    network, target = read(name, tmp_path)
    features = network.fuse(target_states(target))[:-1]
    assert network.hidden_layers == (NORMED,)
    assert (network.feature_size, network.num_parallel, network.max_len) == (HIDDEN, 1, 256)
    served = Served(network)
    found = torch.cat([served.run(TEXT[1:6], features[:5]), served.run(TEXT[6:], features[5:])])
    ids, read_features = TEXT[1:], features
    for token in (17, 40):
        found = torch.cat([found, served.run([token], found[-1:])])
        ids, read_features = [*ids, token], torch.cat([read_features, found[-2:-1]])
    wanted = plainly(name, target, ids, read_features)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    head = target.get_output_embeddings().weight
    torch.testing.assert_close(network.logits(found), wanted @ head.T, atol=1e-3, rtol=1e-4)


def stack_experts(tensors: Tensors) -> None:
    """As Qwen3.5's checkpoints have them: all experts in one tensor, both of the first products too."""
    start = "mtp.layers.0.mlp.experts."
    each = {
        part: torch.stack([tensors.pop(f"{start}{i}.{part}_proj.weight") for i in range(4)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{start}gate_up_proj"] = torch.cat([each["gate"], each["up"]], dim=1)
    tensors[f"{start}down_proj"] = each["down"]


def test_experts_in_one_tensor_are_those_one_by_one(tmp_path: Path) -> None:
    check_whole("qwen3_5_moe", *read("qwen3_5_moe", tmp_path, stack_experts))


def test_a_module_beside_a_text_half_is_the_halfs(tmp_path: Path) -> None:
    """Checkpoints of texts and images have ``mtp`` beside ``model.language_model``."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    text = FAMILIES["qwen3_5"].config(num_hidden_layers=NUM_LAYERS)
    config = hf.Qwen3_5Config(text_config=text, vision_config=vision | {"out_hidden_size": HIDDEN})
    hf.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with stored_tensors(tmp_path) as stored:
        assert "model.language_model.norm.weight" in stored
        stored.update(module_tensors("qwen3_5", tmp_path / "scratch"))
    half = find_text_half(str(tmp_path), load_config(str(tmp_path)))
    assert half is not None
    target = load_weights(
        str(tmp_path), half.config, half.kind, key_mapping=half.key_mapping
    ).eval()
    check_whole("qwen3_5", bound(target, tmp_path), target)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "mellum"])
def test_transformers_own_module_writes_the_same(name: str, tmp_path: Path) -> None:
    """It has each row at its token's own position, where none is blank."""
    network, target = read(name, tmp_path)
    features = target_states(target)[:-1]
    pattern = rf"^{FAMILIES[name].root}.*".replace(".", r"\.", 3)
    target._keys_to_ignore_on_load_unexpected = [pattern]
    theirs = MtpModel.from_pretrained(target).eval()
    theirs.config._attn_implementation = "eager"
    positions = torch.arange(1, len(TEXT))
    with torch.inference_mode():
        wanted = theirs.forward_layer(
            0, features[None], positions[None], None, input_ids=torch.tensor([TEXT[1:]])
        )[0]
    found = Served(network).run(TEXT[1:], features, first=1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_an_embedding_and_a_head_of_the_modules_own_are_used(tmp_path: Path) -> None:
    """Published ones are mostly the target's again, and then take no memory."""
    generator = torch.Generator().manual_seed(9)
    own = {
        f"{LAST}{name}": torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
        for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    network, target = read("glm4_moe", tmp_path, lambda tensors: tensors.update(own))
    features = target_states(target)[:-1]
    target.get_input_embeddings().weight.copy_(own[f"{LAST}embed_tokens.weight"])
    found = Served(network).run(TEXT[1:], features)
    wanted = plainly("glm4_moe", target, TEXT[1:], features)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        wanted_logits = found @ own[f"{LAST}shared_head.head.weight"].T
    torch.testing.assert_close(network.logits(found), wanted_logits, atol=1e-4, rtol=1e-4)


def test_what_is_the_targets_again_takes_no_memory(tmp_path: Path) -> None:
    theirs = own_model(glm(num_hidden_layers=NUM_LAYERS), seed=0)
    again = {
        f"{LAST}embed_tokens.weight": theirs.get_input_embeddings().weight,
        f"{LAST}shared_head.head.weight": theirs.get_output_embeddings().weight,
    }
    target = write("glm4_moe", tmp_path, lambda tensors: tensors.update(again))
    network = read_mtp(target, tmp_path, target_facts(target))
    sizes = [tuple(each.shape) for each in network.parameters()]
    assert (VOCAB_SIZE, HIDDEN) not in sizes


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("mimo", "mtp_layers.0.", "mtp_layers.1."), ("mellum", "mtp.layers.0.", "mtp.layers.1.")],
)
def test_of_several_modules_the_first_runs_and_the_log_says_so(
    name: str, first: str, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def double(tensors: Tensors) -> None:
        for key in [key for key in tensors if first in key]:
            tensors[key.replace(first, second)] = -tensors[key]

    target = write(name, tmp_path, double)
    with caplog.at_level("WARNING"):
        network = read_mtp(target, tmp_path, target_facts(target))
    assert "has 2 MTP modules: the first drafts all tokens" in caplog.text
    torch.testing.assert_close(network.join.weight, own_parts()[2])


def test_a_module_is_of_its_targets_type_and_on_its_device(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path)
    target = load_model(str(tmp_path), CPU, "bfloat16")
    network = read_mtp(target, tmp_path, target_facts(target))
    assert {each.dtype for each in network.parameters()} == {
        each.dtype for each in target.parameters()
    }
    assert network.body.rotary_emb.inv_freq.dtype == torch.float32


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def holding(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


_MIMO = "model.mtp_layers.0."
# Family, what is said, and what is changed.
CHANGES: list[tuple[str, str, Callable[[Tensors], object]]] = [
    ("mimo", "has no MTP module of a kind that is known", lambda tensors: tensors.clear()),
    (
        "glm4_moe",
        f"are missing: {LAST}self_attn.o_proj.weight",
        without(f"{LAST}self_attn.o_proj.weight"),
    ),
    ("glm4_moe", f"tensors are missing: {LAST}hnorm.weight", without(f"{LAST}hnorm.weight")),
    ("qwen3_5", "tensors are missing: mtp.norm.weight", without("mtp.norm.weight")),
    (
        "mellum",
        r"experts do not all have mtp\.layers\.0\.mlp\.experts\.\*\.up_proj\.weight",
        without("mtp.layers.0.mlp.experts.1.up_proj.weight"),
    ),
    (
        "glm4_moe",
        r"experts do not all have .*\*\.down_proj\.weight, or not in one shape",
        holding(f"{LAST}mlp.experts.2.down_proj.weight", 32, 64),
    ),
    (
        "glm4_moe",
        rf"{LAST}mlp\.experts\.\w+ \[3, .*instead of \[4, ",
        lambda tensors: drop(tensors, "experts.3."),
    ),
    (
        "mimo",
        f"not in the configuration: {_MIMO}mlp.gate_proj.scale",
        holding(f"{_MIMO}mlp.gate_proj.scale", 1),
    ),
    ("qwen3_5", "unknown tensors: mtp.gate.weight", holding("mtp.gate.weight", 1)),
    (
        "mimo",
        rf"{_MIMO}self_attn\.k_proj\.weight \[32, 32\] instead of \[32, 64\]",
        holding(f"{_MIMO}self_attn.k_proj.weight", 32, 32),
    ),
    (
        "mimo",
        rf"{_MIMO}input_proj\.weight \[64, 64\] instead of \[64, 128\]",
        holding(f"{_MIMO}input_proj.weight", 64, 64),
    ),
    (
        "mimo",
        f"not finite: {_MIMO}mlp.up_proj.weight",
        lambda tensors: tensors[f"{_MIMO}mlp.up_proj.weight"].fill_(torch.nan),
    ),
    (
        "qwen3_next",
        "has no self_attn: state that is not keys and values is not kept",
        lambda tensors: rename(tensors, ".self_attn.", ".linear_attn."),
    ),
    (
        "glm4_moe",
        r"shared_head\.head\.weight \[96, 64\] instead of \[97, 64\]",
        holding(f"{LAST}shared_head.head.weight", 96, 64),
    ),
]


def drop(tensors: Tensors, part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize(("name", "told", "change"), CHANGES)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, name: str, told: str, change: Callable[[Tensors], object]
) -> None:
    target = write(name, tmp_path, change)
    with pytest.raises(DraftRefusedError, match=told) as refused:
        read_mtp(target, tmp_path, target_facts(target))
    assert str(refused.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kinds", "told"),
    [
        ("mellum", ["indexed_attention"], "layers of kind indexed_attention"),
        (
            "mellum",
            None,
            "of kind full_attention or sliding_attention: mtp_layer_types is not given",
        ),
        # A field that transformers does not know.
        ("mimo", "full_attention", "mtp_layer_types is not a list of kinds of layers"),
    ],
)
def test_a_layer_of_a_kind_that_is_not_served_or_not_said_is_refused(
    name: str, kinds: Any, told: str, tmp_path: Path
) -> None:
    target = write(name, tmp_path)
    target.config.mtp_layer_types = kinds
    with pytest.raises(DraftRefusedError, match=told):
        read_mtp(target, tmp_path, target_facts(target))
