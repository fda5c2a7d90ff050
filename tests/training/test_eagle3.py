"""EAGLE-3 and P-EAGLE in training, against the networks that are served: what rows compute over whole
texts is what the engine's steps compute row by row, and folders hold it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from engine.drafting.facts import TargetFacts
from engine.drafting.published.eagle3 import read
from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.folder import DraftFolder
from engine.drafting.published.networks import place
from training.eagle3 import (
    Eagle3Chain,
    PEagleChain,
    TrainedChain,
    begin_from,
    llama_config,
    make_network,
)
from training.folders import write_eagle3, write_peagle
from training.head_losses import Rows, chosen_rows
from worlds.published_rows import DraftStore
from worlds.published_rows import Rows as StoredRows

torch.set_num_threads(1)

VOCAB, HIDDEN, LAYERS, WIDTH = 40, 24, (2, 5, 7), 11
FACTS = TargetFacts(HIDDEN, VOCAB, 10, "a" * 32)
DRAFT_IDS = torch.tensor([1, 4, 5, 9, 11, 20, 21, 39])
MASK = 3


def target_config(**more: object) -> LlamaConfig:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 20,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    }
    return LlamaConfig(**(settings | more))


def network(num_layers: int = 1, num_parallel: int = 1, **more: object) -> Eagle3Network:
    """Returns one whose every weight counts."""
    torch.manual_seed(0)
    mask = MASK if num_parallel > 1 else None
    config = llama_config(target_config(**more), num_layers)
    made = make_network(config, LAYERS, DRAFT_IDS, num_parallel, mask)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.2))
    return made


def texts(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, nn.Embedding]:
    """Returns token ids and states, padded, and the target's embedding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=generator)
    states = torch.randn(len(lengths), max(lengths), len(LAYERS) * HIDDEN, generator=generator)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    return ids, states, nn.Embedding.from_pretrained(embedding)


def served(folder: Path, embed: nn.Embedding) -> Eagle3Network:
    found = read(DraftFolder.open(folder), FACTS)
    found.bind(embed, nn.Identity())
    place(found, torch.device("cpu"), torch.float32)
    return found


def drafted(net: Eagle3Network, ids: list[int], states: torch.Tensor, row: int, num_steps: int):
    """Returns logits of ``num_steps`` rows as the engine runs them: ``row`` and the known ones before it
    in one step, then those that follow it one by one, or, of mask tokens, all at once."""
    store = DraftStore(net, "sdpa", 1)
    (text,) = store.texts
    known = StoredRows(text, ids[1 : row + 2], net.fuse(states[: row + 1]))
    store.step(known)
    features, read_by_head = known.outputs
    found = [net.logits(read_by_head[-1])]
    if num_steps == 1:
        return found
    if net.num_parallel > 1:
        count = num_steps - 1
        features = net.mask_feature().expand(count, -1)
        masks = StoredRows(text, [MASK] * count, features, [-1, *range(count - 1)])
        store.step(masks)
        return [*found, *net.logits(masks.outputs[1])]
    feature = features[-1:]
    for step in range(1, num_steps):
        later = StoredRows(text, [ids[row + 1 + step]], feature)
        store.step(later)
        feature, read_by_head = later.outputs
        found.append(net.logits(read_by_head[0]))
    return found


def chain_of(net: Eagle3Network, embed: nn.Embedding) -> TrainedChain:
    if net.num_parallel > 1:
        return PEagleChain(net, embed(torch.tensor(MASK)))
    return Eagle3Chain(net)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "eagle3": network,
    "eagle3 of two layers": lambda: network(num_layers=2),
    "eagle3 of other rope": lambda: network(rope_parameters=LLAMA3, num_key_value_heads=4),
    "p_eagle": lambda: network(num_parallel=4),
    "p_eagle of three layers": lambda: network(num_layers=3, num_parallel=4),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_written_head_says_what_it_said_in_training(make, tmp_path: Path) -> None:
    net, lengths = make(), (WIDTH, 8)
    ids, states, embed = texts(lengths)
    if net.num_parallel > 1:
        write_peagle(tmp_path, net, "target", ["LlamaForCausalLM"])
    else:
        write_eagle3(tmp_path, net)
    found = served(tmp_path, embed)
    rows = chosen_rows([2, 0], lengths, 100, torch.Generator().manual_seed(0))
    with torch.no_grad():
        read_by_head = chain_of(net, embed)(embed(ids.roll(-1, 1)), states, rows, 4)
        for step, hidden in enumerate(read_by_head):
            learning, _ = rows.of_step(step, WIDTH)
            assert len(learning) == len(hidden) > 5
            logits = net.lm_head(hidden)
            for place_in_batch, got in zip(learning.tolist(), logits, strict=True):
                text, number = divmod(place_in_batch, rows.at.shape[1])
                row = int(rows.at[text, number])
                wanted = drafted(found, ids[text].tolist(), states[text], row, step + 1)[step]
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_rows_see_nothing_of_other_rows_or_of_what_comes_later() -> None:
    """A row says the same alone and among others, and whatever follows the token that it reads."""
    net = network(num_layers=2)
    ids, states, embed = texts((WIDTH,))
    embeddings = embed(ids.roll(-1, 1))
    many = chosen_rows([0], (WIDTH,), 100, torch.Generator())
    alone = Rows(torch.tensor([[4]]), torch.tensor([[True]]), torch.tensor([WIDTH]))
    changed = states.clone()
    changed[:, 5:] = 7.0
    with torch.no_grad():
        chain = Eagle3Chain(net)
        among = [step[4] for step in chain(embeddings, states, many, 3)]
        by_itself = [step[0] for step in chain(embeddings, changed, alone, 3)]
    torch.testing.assert_close(among, by_itself)


def test_a_mask_row_reads_the_mask_alone() -> None:
    net = network(num_parallel=3)
    ids, states, embed = texts((WIDTH,))
    rows = Rows(torch.tensor([[4]]), torch.tensor([[True]]), torch.tensor([WIDTH]))
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % VOCAB
    with torch.no_grad():
        chain = chain_of(net, embed)
        first = chain(embed(ids.roll(-1, 1)), states, rows, 3)
        second = chain(embed(other.roll(-1, 1)), states, rows, 3)
        torch.testing.assert_close(first, second)
        net.mask_hidden.add_(1.0)
        third = chain(embed(ids.roll(-1, 1)), states, rows, 3)
    torch.testing.assert_close(first[0], third[0])
    assert float((first[1] - third[1]).abs().max()) > 1e-2


def test_gradients_reach_every_weight() -> None:
    for net in (network(num_layers=2), network(num_layers=2, num_parallel=3)):
        ids, states, embed = texts((WIDTH, 8))
        rows = chosen_rows([2, 0], (WIDTH, 8), 3, torch.Generator().manual_seed(0))
        found = chain_of(net, embed)(embed(ids.roll(-1, 1)), states, rows, 3)
        sum(net.lm_head(each).square().sum() for each in found).backward()
        grads = {name: weight.grad for name, weight in net.named_parameters()}
        assert [name for name, grad in grads.items() if grad is None or not grad.any()] == []


# --- what it begins with ---


def test_layers_are_made_as_the_targets() -> None:
    config = llama_config(target_config(rope_parameters=LLAMA3, sliding_window=3), 2)
    assert (config.head_dim, config.rms_norm_eps, config.num_hidden_layers) == (8, 1e-3, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (VOCAB, 64)
    assert config.rope_parameters == LLAMA3
    nested = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": 4}
    nested["rope_parameters"] = {"full_attention": LLAMA3}
    usual = llama_config(SimpleNamespace(**nested), 1)
    assert usual.rope_parameters["rope_type"] == "default"
    assert (usual.intermediate_size, usual.num_key_value_heads) == (72, 4)


def test_a_network_begins_as_the_layer_it_took() -> None:
    torch.manual_seed(0)
    net = make_network(llama_config(target_config(), 2), LAYERS, DRAFT_IDS)
    own = dict(net.layers[1].named_parameters())
    layer = {name.split(".")[-2]: torch.randn_like(each) for name, each in own.items()}
    head, norm = torch.randn(len(DRAFT_IDS), HIDDEN), torch.randn(HIDDEN)
    before = net.layers[1].mlp.up_proj.weight.clone()
    begin_from(net, [layer, {**layer, "up_proj": torch.randn(4, 4)}], norm, head)
    torch.testing.assert_close(net.lm_head.weight.data, head)
    torch.testing.assert_close(net.norm.weight.data, norm)
    first, second = net.layers
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(first.self_attn, name).weight.data
        torch.testing.assert_close(weight[:, HIDDEN:], layer[name])
        assert float(weight[:, :HIDDEN].abs().mean()) < 0.1 * float(layer[name].abs().mean())
        torch.testing.assert_close(getattr(second.self_attn, name).weight.data, layer[name])
    torch.testing.assert_close(first.hidden_norm.weight.data, layer["input_layernorm"])
    torch.testing.assert_close(first.mlp.down_proj.weight.data, layer["down_proj"])
    # Of another shape: it stays random.
    torch.testing.assert_close(second.mlp.up_proj.weight, before)
    # What the first layer reads is the newest of the states, and a little of all.
    states = torch.randn(5, len(LAYERS) * HIDDEN)
    near = functional.cosine_similarity(net.fuse(states).detach(), states[:, -HIDDEN:])
    assert float(near.min()) > 0.9


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no mask token"):
        write_peagle(tmp_path, network(), "x", [])
    net = network(num_parallel=2)
    net.spec = type(net.spec)(
        net.spec.layer, HIDDEN, (LAYERS,), 8, norm_output=True, mask_token_id=3
    )
    with pytest.raises(ValueError, match="vLLM knows no P-EAGLE"):
        write_peagle(tmp_path, net, "x", [])
    assert list(tmp_path.iterdir()) == []


def test_notes_and_fingerprint_are_in_the_configuration(tmp_path: Path) -> None:
    notes = {"held_out_top1": [0.5]}
    write_eagle3(tmp_path / "a", network(), "b" * 32, notes)
    write_peagle(tmp_path / "b", network(num_parallel=5), "x", ["Y"], "b" * 32, notes)
    for name in ("a", "b"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["target_fingerprint"] == "b" * 32
        assert config["held_out_top1"] == [0.5]
    again = read(DraftFolder.open(tmp_path / "b"), TargetFacts(HIDDEN, VOCAB, 10, "b" * 32))
    assert (again.num_parallel, again.mask_token_id, again.hidden_layers) == (5, MASK, LAYERS)
