"""Folders of EAGLE-3: how they are recognised, which layers they mean, what is refused and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.drafting.facts import TargetFacts
from engine.drafting.published.eagle3 import read, recognised
from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.folder import DraftFolder, DraftRefusedError
from engine.drafting.published.networks import place
from training.folders import write_eagle3
from worlds.published_eagle3 import FACTS, FORMS, IDS, Form, write_folder, written

PLAIN, SPECULATORS = FORMS["midlayer"], FORMS["speculators"]
PARALLEL, QWEN3 = FORMS["P-EAGLE"], FORMS["speculators, Qwen3"]
Changes = dict[str, Any]
Change = Callable[[Any, dict[str, torch.Tensor]], None]


def loaded(path: Path, form: Form, facts: TargetFacts = FACTS) -> Eagle3Network:
    return read(DraftFolder.open(written(path, form)), facts)


def refusal(
    path: Path, form: Form, change: Change = lambda *_: None, facts: TargetFacts = FACTS
) -> str:
    """Returns why a folder is refused whose configuration and tensors were changed."""
    config, tensors = form.config(), form.tensors()
    change(config, tensors)
    folder = DraftFolder.open(write_folder(path, config, tensors, form.binary))
    with pytest.raises(DraftRefusedError) as refused:
        read(folder, facts)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def without(name: str) -> Change:
    def change(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def holding(name: str, tensor: torch.Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: tensor})


def saying(**changes: Any) -> Change:
    return lambda config, _: config.update(changes)


# --- recognised ---


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_recognised(form: Form) -> None:
    expected = "p_eagle" if "mask_hidden" in form.tensors() else "eagle3"
    assert recognised(form.config(), form.tensors()) == expected


def test_a_folder_that_says_nothing_is_recognised_by_its_tensors() -> None:
    assert recognised({"architectures": ["LlamaForCausalLM"]}, PLAIN.tensors())
    assert recognised({}, FORMS["a pickle"].tensors())
    assert recognised({"architectures": ["LlamaForCausalLMEagle3"]}, ["fc.weight"])


def test_other_methods_are_not_recognised() -> None:
    dflash = ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.mlp.up_proj.weight"]
    assert not recognised({"architectures": ["DFlashDraftModel"]}, dflash)
    assert not recognised({"speculators_model_type": "dflash"}, SPECULATORS.tensors())
    assert not recognised({"architectures": 3}, ["model.layers.0.mlp.up_proj.weight"])


# --- which layers ---


def nested(ids: object) -> Changes:
    return {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}


@pytest.mark.parametrize(
    ("said", "readings"),
    [
        ({}, [(2, 5, 7), (3, 6, 8), (1, 4, 6)]),
        ({IDS: []} | nested(None), [(2, 5, 7), (3, 6, 8), (1, 4, 6)]),
        ({IDS: [2, 5, 8]}, [(2, 5, 8), (3, 6, 9), (1, 4, 7)]),
        (nested([1, 4, 7]), [(2, 5, 8), (3, 6, 9), (1, 4, 7)]),
        # Twice, as we write it: the same layers; and with the same numbers, one of which is wrong.
        ({IDS: [2, 5, 8]} | nested([1, 4, 7]), [(2, 5, 8), (3, 6, 9), (1, 4, 7)]),
        ({IDS: [2, 5, 8]} | nested([2, 5, 8]), [(2, 5, 8), (3, 6, 9), (1, 4, 7), (4, 7, 10)]),
        # At the ends only one neighbour is there.
        ({IDS: [0, 5, 8]}, [(0, 5, 8), (1, 6, 9)]),
        ({IDS: [2, 5, 10]}, [(2, 5, 10), (1, 4, 9)]),
        (nested([1, 4, 10]), [(1, 4, 10)]),
    ],
)
def test_layers_are_read_as_where_they_stand_says(
    said: Changes, readings: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Numbers at the top say which state enters, nested ones which state leaves."""
    network = loaded(tmp_path, PLAIN.but(more=said))
    assert network.hidden_layers == readings[0]
    assert sorted(network.candidate_layers) == sorted(readings)
    assert network.candidate_layers[0] == readings[0]


def test_layers_follow_another_reading(tmp_path: Path) -> None:
    network = loaded(tmp_path, PLAIN)
    network.hidden_layers = network.candidate_layers[1]
    write_eagle3(tmp_path / "written", network)
    found = read(DraftFolder.open(tmp_path / "written"), FACTS)
    assert found.hidden_layers == (3, 6, 8)


# --- P-EAGLE ---


def test_the_default_proposal_says_how_many_tokens_a_pass_drafts(tmp_path: Path) -> None:
    config, tensors = PARALLEL.config(), PARALLEL.tensors()
    config["speculators_config"]["default_proposal_method"] = "other"
    config["speculators_config"]["proposal_methods"].append(
        {"proposal_type": "other", "speculative_tokens": 6}
    )
    folder = DraftFolder.open(write_folder(tmp_path, config, tensors, binary=False))
    assert read(folder, FACTS).num_parallel == 6


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
@pytest.mark.parametrize("shape", [(72,), (1, 72), (1, 1, 72)])
def test_p_eagle_in_the_plain_form(key: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    form = PLAIN.but(more={key: 9, "para_depths": 3})
    tensors = form.tensors() | {"mask_hidden": torch.arange(72.0).view(shape)}
    network = read(DraftFolder.open(write_folder(tmp_path, form.config(), tensors, False)), FACTS)
    assert (network.num_parallel, network.mask_token_id) == (3, 9)
    with torch.inference_mode():
        expected = network.fuse(torch.arange(72.0)[None])[0]
        torch.testing.assert_close(network.mask_feature(), expected)


def test_p_eagle_of_unsaid_depth_drafts_eight(tmp_path: Path) -> None:
    form = PLAIN.but(more={"mask_token_id": 9})
    tensors = form.tensors() | {"mask_hidden": torch.ones(72)}
    network = read(DraftFolder.open(write_folder(tmp_path, form.config(), tensors, False)), FACTS)
    assert network.num_parallel == 8


# --- refused ---


def adding(**method: Any) -> Change:
    return lambda config, _: config["speculators_config"]["proposal_methods"][0].update(method)


def eagle_config(**keys: Any) -> Change:
    return saying(eagle_config=keys)


K_PROJ = "midlayer.self_attn.k_proj.weight"
# By what is said of them.
REFUSED: dict[str, Change] = {
    # Of another target.
    "vocab_size is 41, and the target's is 40": saying(vocab_size=41),
    "target_hidden_size is 32, and the target's is 24": saying(target_hidden_size=32),
    f"it reads the states of layers {[2, 20, 40]}, and the target has 10": saying(
        **{IDS: [2, 20, 40]}
    ),
    "it names 2 layers, and fc.weight is for the states of 3": saying(**{IDS: [2, 5]}),
    # Tensors.
    "tensors are missing: fc.weight": without("fc.weight"),
    "tensors are missing: norm.weight": without("norm.weight"),
    "tensors are missing: layers.0.hidden_norm.weight": without("midlayer.hidden_norm.weight"),
    "tensors are missing: layers.0.self_attn.q_proj.weight": without(
        "midlayer.self_attn.q_proj.weight"
    ),
    "tensors are missing: d2t (for 16 tokens of the target's 40)": without("d2t"),
    "tensors are missing: lm_head.weight (the target's is for 40 tokens, not 16)": without(
        "lm_head.weight"
    ),
    "tensors are missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight": saying(
        fc_norm=True
    ),
    "tensors are missing: fc_norm.1.weight, fc_norm.2.weight": holding(
        "fc_norm.0.weight", torch.ones(24)
    ),
    **{
        f"unknown tensors: {name}": holding(name, torch.ones(24))
        for name in ("midlayer.self_attn.q_norm.weight", "fc.scale", "mask", "fc.bias.x")
    },
    "a tensor is there under two names": holding("layers.0.hidden_norm.weight", torch.ones(24)),
    f"{K_PROJ} [12, 24] instead of [12, 48]": holding(K_PROJ, torch.ones(12, 24)),
    "fc.weight [24] does not have 2 dimensions": holding("fc.weight", torch.ones(24)),
    "d2t [15] instead of [16]": holding("d2t", torch.zeros(15).long()),
    "t2d [41] instead of [40]": holding("t2d", torch.zeros(41).long()),
    "weights that are not finite: fc.weight": holding(
        "fc.weight", torch.full((24, 72), float("inf"))
    ),
    "d2t gives an id twice": holding("d2t", -torch.arange(16)),
    "d2t holds torch.float32": holding("d2t", torch.zeros(16)),
    # Settings.
    "config.json has unknown keys: eagle_config.new": eagle_config(new=1),
    "eagle_config.use_aux_hidden_state is False, and only True is known": eagle_config(
        use_aux_hidden_state=False
    ),
    "eagle_config.use_mtp_layernorm is True, and only False is known": eagle_config(
        use_mtp_layernorm=True
    ),
    f"eagle_config.{IDS} is not a list of whole numbers": eagle_config(**{IDS: "2"}),
    "model_type is 'gpt2', and layers of llama and qwen3 are known": saying(model_type="gpt2"),
    "hidden_size is 0, not a positive whole number": saying(hidden_size=0),
    "num_key_value_heads is 3, which does not divide 4 heads": saying(num_key_value_heads=3),
    "num_hidden_layers is 2, and there are tensors of 1": saying(num_hidden_layers=2),
    "draft_vocab_size is '16', not a positive whole number": saying(draft_vocab_size="16"),
    "norm_output is 1, neither true nor false": saying(norm_output=1),
}
OTHERS_REFUSED: list[tuple[Form, Change, str]] = [
    *((PLAIN, change, says) for says, change in REFUSED.items()),
    (
        PLAIN.but(num_states=4),
        lambda *_: None,
        "it names 3 layers, and fc.weight is for the states of 4",
    ),
    *(
        (PLAIN, saying(**said), "tensors are missing: input_norm.weight")
        for said in ({"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}})
    ),
    *(
        (PLAIN, holding("d2t", map_), "d2t gives ids outside of the target's 40")
        for map_ in (torch.full((16,), 39), -torch.arange(16) - 1)
    ),
    *(
        (PLAIN, holding("t2d", make(40, dtype=torch.bool)), "t2d names other tokens than d2t")
        for make in (torch.zeros, torch.ones)
    ),
    *(
        (
            FORMS["a norm of all"],
            without(name),
            f"tensors are missing: {name} (the target's is for 24 dimensions, not 32)",
        )
        for name in ("embed_tokens.weight", "lm_head.weight")
    ),
    (PARALLEL, without("mask_hidden"), "tensors are missing: mask_hidden"),
    *(
        (
            PARALLEL,
            saying(mask_token_id=token_id),
            f"mask_token_id is {token_id}, not a token of the target's 40",
        )
        for token_id in (None, 40)
    ),
    (
        PARALLEL,
        holding("mask_hidden", torch.ones(1, 1, 48)),
        "mask_hidden [1, 1, 48] instead of [1, 1, 72]",
    ),
    (
        SPECULATORS,
        saying(speculators_config={"new": 1}),
        "config.json has unknown keys: speculators_config.new",
    ),
    (
        SPECULATORS,
        adding(tree=1),
        "config.json has unknown keys: speculators_config.proposal_methods[0].tree",
    ),
    (
        SPECULATORS,
        saying(speculators_config={"proposal_methods": [1]}),
        "speculators_config.proposal_methods is not a list of objects",
    ),
]


@pytest.mark.parametrize(("form", "change", "says"), OTHERS_REFUSED)
def test_what_does_not_fit_is_refused(
    form: Form, change: Change, says: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, form, change) == says


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, PLAIN, saying(target_fingerprint="0")).startswith(
        "it was trained for other weights of the target"
    )
    for width in (20, 80):
        assert refusal(tmp_path, PLAIN, facts=TargetFacts(width, 40, 10, "")) == (
            f"fc.weight [24, 72] reads no whole number of states of {width}"
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        {"rms_norm_eps": "small"},
        {"hidden_act": "no such"},
        {"rope_scaling": 3},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"rope_type": "no such"}},
    ],
)
def test_what_transformers_cannot_build_is_refused(changes: Changes, tmp_path: Path) -> None:
    assert refusal(tmp_path, PLAIN, saying(**changes)).startswith(
        "the layers of config.json cannot be read: "
    )


def test_absurd_sizes_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    """Weights of as many terabytes as no machine has."""
    changes = saying(hidden_size=1 << 22, intermediate_size=1 << 22)
    message = refusal(tmp_path, FORMS["a pickle"], changes)
    assert message.startswith("embed_tokens.weight [40, 24] instead of [40, 4194304], fc.weight ")


# --- written ---

WRITTEN = {name: form for name, form in FORMS.items() if form.model_type == "llama"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", WRITTEN.values(), ids=WRITTEN)
def test_what_is_written_is_read_back_equal(form: Form, dtype: torch.dtype, tmp_path: Path) -> None:
    network = loaded(tmp_path / "read", form)
    place(network, torch.device("cpu"), dtype)
    write_eagle3(tmp_path / "written", network, FACTS.fingerprint)
    found = read(DraftFolder.open(tmp_path / "written"), FACTS)
    expected = network.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name])
    assert (found.token_map is None) == (network.token_map is None)
    if found.token_map is not None and network.token_map is not None:
        assert torch.equal(found.token_map, network.token_map)
    for field in ("hidden_layers", "max_len", "num_parallel", "mask_token_id", "shapes"):
        assert getattr(found, field) == getattr(network, field)
    for field in ("norm_before_residual", "norm_output", "norms_states", "norms_each_state"):
        assert getattr(found.spec, field) == getattr(network.spec, field)
    assert torch.equal(found.rotary_emb.inv_freq, network.rotary_emb.inv_freq)


def test_the_written_form_is_the_plain_one(tmp_path: Path) -> None:
    write_eagle3(tmp_path / "written", loaded(tmp_path, SPECULATORS))
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    assert (config["vocab_size"], config["draft_vocab_size"]) == (40, 16)
    assert config[IDS] == [2, 5, 7]
    assert config["eagle_config"][IDS] == [1, 4, 6]
    assert "target_fingerprint" not in config
    tensors = load_file(tmp_path / "written" / "model.safetensors")
    assert not any(name.startswith("layers.0.") for name in tensors)
    assert "midlayer.self_attn.q_proj.weight" in tensors
    for name in ("d2t", "t2d"):
        assert torch.equal(tensors[name], SPECULATORS.tensors()[name])


def test_a_fingerprint_binds_what_is_written_to_its_target(tmp_path: Path) -> None:
    write_eagle3(tmp_path / "written", loaded(tmp_path, PLAIN), "b" * 32)
    with pytest.raises(DraftRefusedError, match="trained for other weights"):
        read(DraftFolder.open(tmp_path / "written"), FACTS)


def test_layers_of_another_family_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers of Llama's family"):
        write_eagle3(tmp_path / "written", loaded(tmp_path, QWEN3))
