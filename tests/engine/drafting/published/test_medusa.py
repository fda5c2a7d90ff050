"""Medusa's heads in every form that they are published in, beside readings in plain torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import NORMED
from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import DraftFolder, DraftRefusedError
from engine.drafting.published.medusa import MedusaNetwork, ResidualHeads, recognised
from engine.drafting.published.medusa import read as read_medusa
from engine.drafting.published.networks import place
from training.folders import write_medusa

HIDDEN, VOCAB, HEADS, LAYERS = 16, 40, 3, 2
FACTS = TargetFacts(HIDDEN, VOCAB, 4, "f" * 32)
Tensors = dict[str, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / HIDDEN**0.5


def target_head() -> torch.nn.Linear:
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight = torch.nn.Parameter(random(VOCAB, HIDDEN, seed=99))
    return head


def authors() -> Tensors:
    """Three heads of two blocks, each with a projection of its own."""
    found = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            seed = 10 * head + layer
            found[f"{head}.{layer}.linear.weight"] = random(HIDDEN, HIDDEN, seed=seed)
            found[f"{head}.{layer}.linear.bias"] = random(HIDDEN, seed=seed + 5)
        found[f"{head}.{LAYERS}.weight"] = random(VOCAB, HIDDEN, seed=50 + head)
    return found


def converted() -> Tensors:
    """The same tensors by vLLM's names."""
    found = {}
    for name, tensor in authors().items():
        head, layer, *rest = name.split(".")
        own = f"blocks.{head}.layers.{layer}.{rest[-1]}"
        found[own if rest[0] == "linear" else f"lm_heads.{head}.weight"] = tensor
    return found


AUTHORS_CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": LAYERS, "version": "2"}
CONVERTED_CONFIG = {
    "model_type": "medusa",
    "num_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
}


def write(path: Path, config: dict[str, Any], tensors: Tensors) -> DraftFolder:
    """A folder in the authors' form, or in vLLM's, by the names of the tensors."""
    (path / "config.json").write_text(json.dumps(config))
    if any(re.match(r"\d", name) for name in tensors):
        torch.save(tensors, path / "medusa_lm_head.pt")
    else:
        save_file(tensors, path / "model.safetensors")
    return DraftFolder.open(path)


def read(folder: DraftFolder) -> MedusaNetwork:
    network = read_medusa(folder, FACTS)
    place(network, torch.device("cpu"), torch.float32)
    network.bind(torch.nn.Identity(), target_head())
    return network


def states_of(tensors: Tensors, hidden: torch.Tensor, head: int) -> torch.Tensor:
    """The blocks of one head, by the authors' names."""
    for layer in range(LAYERS):
        inner = hidden @ tensors[f"{head}.{layer}.linear.weight"].T
        inner = inner + tensors.get(f"{head}.{layer}.linear.bias", torch.zeros(HIDDEN))
        hidden = hidden + inner / (1 + torch.exp(-inner))
    return hidden


def expected(tensors: Tensors, projections: list[torch.Tensor]) -> torch.Tensor:
    rows = [states_of(tensors, HIDDEN_ROWS, head) @ projections[head].T for head in range(HEADS)]
    return torch.stack(rows)


HIDDEN_ROWS = random(5, HIDDEN, seed=7) * 4
OWN = [authors()[f"{head}.{LAYERS}.weight"] for head in range(HEADS)]
TARGETS = [target_head().weight.detach()] * HEADS


def check(network: MedusaNetwork, wanted: torch.Tensor) -> None:
    found = network.logits(network(HIDDEN_ROWS))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_heads_as_their_authors_publish_them(tmp_path: Path) -> None:
    """Their configurations say two heads where the file has more."""
    network = read(write(tmp_path, AUTHORS_CONFIG, authors()))
    assert network.hidden_layers == (NORMED,)
    assert network.num_heads == HEADS
    check(network, expected(authors(), OWN))


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_heads_that_were_a_part_of_a_model_and_safetensors_of_heads(
    tmp_path: Path, prefix: str
) -> None:
    tensors = {prefix + name: tensor for name, tensor in authors().items()}
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS_CONFIG))
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    check(read(DraftFolder.open(tmp_path)), expected(authors(), OWN))


def test_vllms_form_with_a_projection_for_each_head(tmp_path: Path) -> None:
    check(read(write(tmp_path, CONVERTED_CONFIG, converted())), expected(authors(), OWN))


def test_vllms_form_without_biases_reads_none(tmp_path: Path) -> None:
    config = CONVERTED_CONFIG | {"medusa_fc_bias": False}
    tensors = {name: each for name, each in converted().items() if not name.endswith("bias")}
    without = {name: each for name, each in authors().items() if not name.endswith("bias")}
    check(read(write(tmp_path, config, tensors)), expected(without, OWN))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_projection_for_all_heads(tmp_path: Path, name: str) -> None:
    tensors = {key: each for key, each in converted().items() if "lm_heads" not in key}
    tensors[name] = OWN[0].clone()
    config = CONVERTED_CONFIG | {"original_lm_head": True}
    check(read(write(tmp_path, config, tensors)), expected(authors(), [OWN[0]] * HEADS))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reduced_vocabulary_has_no_chance_beyond_it(tmp_path: Path, is_whole: bool) -> None:
    """vLLM cuts projections over the whole vocabulary down to the tokens of the map."""
    token_map = torch.tensor([31, 2, 17, 8])
    tensors = converted() | {"token_map": token_map.int()}
    rows = [each[token_map] for each in OWN]
    if not is_whole:
        tensors |= {f"lm_heads.{head}.weight": each for head, each in enumerate(rows)}
    config = CONVERTED_CONFIG | {"truncated_vocab_size": 4}
    network = read(write(tmp_path, config, tensors))
    wanted = torch.full((HEADS, len(HIDDEN_ROWS), VOCAB), float("-inf"))
    wanted[..., token_map] = expected(authors(), rows)
    check(network, wanted)


def as_stored(tensors: Tensors) -> Tensors:
    """Returns the tensors as bf16 rounds them."""
    return {name: each.bfloat16().float() for name, each in tensors.items()}


def own_heads() -> ResidualHeads:
    heads = ResidualHeads(HEADS, LAYERS, HIDDEN).requires_grad_(False)
    for name, tensor in authors().items():
        head, layer, *rest = name.split(".")
        if rest == ["linear", "weight"]:
            heads.weight[int(layer), int(head)] = tensor.T
        elif rest == ["linear", "bias"]:
            heads.bias[int(layer), int(head), 0] = tensor
    heads.weight.copy_(heads.weight.bfloat16())
    heads.bias.copy_(heads.bias.bfloat16())
    return heads


def test_what_is_written_is_read_with_the_bits_it_had_and_in_front_of_the_targets_head(
    tmp_path: Path,
) -> None:
    heads = own_heads()
    write_medusa(tmp_path, heads, FACTS, {"held_out_top1": [0.5]})
    folder = DraftFolder.open(tmp_path)
    network = read(folder)
    assert torch.equal(network.blocks.weight.float(), heads.weight)
    assert torch.equal(network.blocks.bias.float(), heads.bias)
    check(network, expected(as_stored(authors()), TARGETS))
    assert folder.config["held_out_top1"] == [0.5]
    assert folder.config["target_fingerprint"] == FACTS.fingerprint


def test_what_is_written_with_an_output_head_has_all_that_vllm_looks_for(tmp_path: Path) -> None:
    """vLLM's rules: keys with num and heads or layers are counts, and no parameter may be missing."""
    output_head = target_head().weight
    write_medusa(tmp_path, own_heads(), FACTS, {"num_training_steps": 9}, output_head)
    config = json.loads((tmp_path / "config.json").read_text())
    counts = {key for key in config if "num" in key and ("heads" in key or "layers" in key)}
    assert counts == {"num_heads", "num_hidden_layers"}
    assert config["architectures"] == ["MedusaModel"]
    assert config["truncated_vocab_size"] == config["vocab_size"] == VOCAB
    assert config["hidden_size"] == HIDDEN
    parts = ["weight", "bias"] if config["medusa_fc_bias"] else ["weight"]
    wanted = {"lm_head.weight"} if config["original_lm_head"] else set()
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            wanted |= {f"blocks.{head}.layers.{layer}.{part}" for part in parts}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == wanted
    torch.testing.assert_close(tensors["lm_head.weight"], output_head.detach().bfloat16())
    assert tensors["blocks.1.layers.0.weight"].shape == (HIDDEN, HIDDEN)
    rounded = authors()["1.0.linear.weight"].bfloat16()
    assert torch.equal(tensors["blocks.1.layers.0.weight"], rounded)
    network = read(DraftFolder.open(tmp_path))
    check(network, expected(as_stored(authors()), [tensors["lm_head.weight"].float()] * HEADS))


def test_a_configuration_says_whose_heads_it_is_of() -> None:
    assert recognised(AUTHORS_CONFIG)
    assert recognised(CONVERTED_CONFIG)
    assert not recognised({"model_type": "llama", "num_heads": 3})


Change = Callable[[dict[str, Any], Tensors], object]


def saying(**changes: Any) -> Change:
    return lambda config, _: config.update(changes)


def without(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


def holding(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: random(*shape)})


# By what is said of them.
CHANGES: dict[str, Change] = {
    "is not that of Medusa heads": lambda config, _: config.clear(),
    "num_heads is 4, and there are 3": saying(num_heads=4),
    "num_heads is 'three'": saying(num_heads="three"),
    "num_hidden_layers is 1, and there are 2": saying(num_hidden_layers=1),
    "vocab_size is 41, and this model needs 40": saying(vocab_size=41),
    "hidden_size is 8, and this model needs 16": saying(hidden_size=8),
    "logit_scale is not 1": saying(logit_scale=0.5),
    "trained for other weights": saying(target_fingerprint="0" * 32),
    "tensors are missing: blocks.1.layers.0.bias": without("blocks.1.layers.0.bias"),
    "tensors are missing: lm_heads.2.weight": without("lm_heads.2.weight"),
    "unknown tensors: blocks.0.layers.0.scale": holding("blocks.0.layers.0.scale", 1),
    "unknown tensors: lm_heads.3.weight": holding("lm_heads.3.weight", VOCAB, HIDDEN),
    "lm_head.weight where original_lm_head is not set": holding("lm_head.weight", VOCAB, HIDDEN),
    "numbered beyond 1024": holding("blocks.99999999.layers.0.weight", 1),
    "there are no tensors of heads": lambda _, tensors: drop(tensors, "blocks"),
    r"blocks.2.layers.1.weight \[16, 8\] instead of \[16, 16\]": holding(
        "blocks.2.layers.1.weight", 16, 8
    ),
    r"lm_heads.1.weight \[39, 16\] instead of \[40, 16\]": holding("lm_heads.1.weight", 39, 16),
    "not finite: blocks.0.layers.1.bias": lambda _, tensors: tensors[
        "blocks.0.layers.1.bias"
    ].fill_(float("nan")),
    "tensors are missing: token_map": saying(truncated_vocab_size=4),
    "ids that are not of the target's 40": lambda *of: reduce_to(*of, [1, 40]),
    "names a token twice": lambda *of: reduce_to(*of, [3, 3]),
    "does not hold whole numbers": lambda *of: reduce_to(*of, [0.5, 1.0]),
    "token_map without an output projection": lambda config, tensors: (
        config.update(original_lm_head=True),
        drop(tensors, "lm_heads"),
        reduce_to(config, tensors, [1, 2]),
    ),
}


def drop(tensors: Tensors, start: str) -> None:
    for name in [name for name in tensors if name.startswith(start)]:
        del tensors[name]


def reduce_to(config: dict[str, Any], tensors: Tensors, token_ids: list[Any]) -> None:
    config["truncated_vocab_size"] = len(token_ids)
    tensors["token_map"] = torch.tensor(token_ids)


@pytest.mark.parametrize("told", CHANGES)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, told: str) -> None:
    config, tensors = dict[str, Any](CONVERTED_CONFIG), converted()
    CHANGES[told](config, tensors)
    folder = write(tmp_path, config, tensors)
    with pytest.raises(DraftRefusedError, match=told) as refused:
        read_medusa(folder, FACTS)
    assert str(refused.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(refused.value)


def test_a_pickle_of_anything_but_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS_CONFIG))
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(DraftRefusedError, match=r"medusa_lm_head\.pt cannot be read"):
        DraftFolder.open(tmp_path)
