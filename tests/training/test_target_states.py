"""Heads take two things from their target: its states in texts, kept or not, and its weights in
floats."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import PhiConfig, PhiForCausalLM

from engine.batch import NORMED
from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from training import heads
from training.head_data import Text
from training.target_states import States, Target, chosen_layers
from worlds.counting_target import counting_model
from worlds.packed_models import FORMATS
from worlds.tiny_models import own_states, random_ids, tiny_model

torch.set_num_threads(1)

CPU = torch.device("cpu")
TEXTS = [Text(tuple(random_ids(seed, count)), 2) for seed, count in enumerate((9, 4, 12))]


def saved(name: str, folder: Path, **changes: object) -> Target:
    tiny_model(name, **changes).save_pretrained(folder)
    return Target(str(folder), CPU)


def test_layers_are_eagles_or_those_that_there_are() -> None:
    wanted = {30: (2, 15, 27), 8: (2, 4, 5), 7: (2, 3, 4), 6: (1, 3, 5), 4: (1, 2, 3)}
    wanted |= {2: (0, 1, 2), 1: (0, 1)}
    assert {count: chosen_layers(count) for count in wanted} == wanted


def test_states_are_those_of_the_model(tmp_path: Path) -> None:
    target = saved("llama", tmp_path, num_hidden_layers=8)
    assert target.layers == (2, 4, 5)
    wanted = own_states(target.model, TEXTS[0].ids)
    expected = torch.cat([wanted[each] for each in (*target.layers, NORMED)], -1)
    torch.testing.assert_close(target.states(TEXTS[0].ids), expected.view(9, -1))


def test_a_batch_is_padded_and_kept_states_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved("llama", tmp_path / "model")
    path = tmp_path / "states.bin"
    fresh = States(target, TEXTS, None).read([2, 0])
    assert fresh.ids.tolist() == [list(TEXTS[2].ids), [*TEXTS[0].ids, 0, 0, 0]]
    assert fresh.states.shape == (2, 12, 3 * 64)
    torch.testing.assert_close(fresh.normed[1, :9], target.states(TEXTS[0].ids)[:, -64:])
    assert not bool(fresh.states[1, 9:].any())
    assert States(target, TEXTS, path).read([2, 0]).states.equal(fresh.states)

    read: list[tuple[int, ...]] = []
    states = target.states

    def noted(ids: tuple[int, ...]) -> torch.Tensor:
        read.append(ids)
        return states(ids)

    monkeypatch.setattr(target, "states", noted)
    again = States(target, TEXTS, path).read([2, 0])
    assert again.states.equal(fresh.states)
    assert again.normed.equal(fresh.normed)
    assert read == []
    # More texts behind them: what is there is kept. Another text in front: what follows lies elsewhere.
    more = [*TEXTS, Text((5, 6, 7), 1)]
    assert States(target, more, path).read([0, 2, 3]).states[1].equal(fresh.states[0])
    assert read == [(5, 6, 7)]
    States(target, [Text((1, 2, 3, 4), 1), *TEXTS], path).read([1, 3])
    assert read[1:] == [TEXTS[0].ids, TEXTS[2].ids]


def test_states_that_texts_in_another_order_have_written_over_are_read_again(
    tmp_path: Path,
) -> None:
    target, path = saved("llama", tmp_path / "model"), tmp_path / "states.bin"
    fresh = States(target, TEXTS, None).read([0, 1, 2]).states
    States(target, TEXTS, path).read([0, 1, 2])
    States(target, [TEXTS[2], *TEXTS[:2]], path).read([0])
    assert States(target, TEXTS, path).read([0, 1, 2]).states.equal(fresh)


def test_states_of_another_target_are_not_taken(tmp_path: Path) -> None:
    found = []
    for seed in range(2):
        counting_model(seed).save_pretrained(tmp_path / str(seed))
        target = Target(str(tmp_path / str(seed)), CPU)
        kept = States(target, TEXTS, tmp_path / "states.bin").read([0])
        assert kept.states.equal(States(target, TEXTS, None).read([0]).states)
        found.append(kept.states)
    assert not found[0].equal(found[1])


# --- weights ---


def test_weights_of_llamas_layers_are_taken(tmp_path: Path) -> None:
    target = saved("llama", tmp_path)
    own = target.model.model.layers[1]
    found = target.decoder_layer(1)
    assert len(found) == 9
    torch.testing.assert_close(found["q_proj"], own.self_attn.q_proj.weight)
    torch.testing.assert_close(found["down_proj"], own.mlp.down_proj.weight)
    torch.testing.assert_close(found["input_layernorm"], own.input_layernorm.weight)
    torch.testing.assert_close(target.final_norm(), target.model.model.norm.weight)
    torch.testing.assert_close(target.head, target.model.lm_head.weight)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        # Norms of queries and keys.
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        # Parts under other names.
        ("phi3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_parts_that_are_not_llamas_are_left_out(
    name: str, without: set[str], tmp_path: Path
) -> None:
    llamas = set(saved("llama", tmp_path / "llama").decoder_layer(0))
    assert llamas - set(saved(name, tmp_path / name).decoder_layer(0)) == without


def test_norms_whose_weights_are_less_one_are_taken_with_it(tmp_path: Path) -> None:
    target = saved("gemma2", tmp_path)
    norm = target.model.model.norm
    torch.testing.assert_close(target.final_norm(), norm.weight + 1, rtol=1e-4, atol=1e-4)


def test_an_output_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = PhiForCausalLM(PhiConfig(vocab_size=50, num_hidden_layers=1, **sizes))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has a bias"):
        Target(str(tmp_path), CPU)


@pytest.mark.parametrize("name", ["Q4_K_and_Q6_K_tied", "awq"])
def test_weights_in_few_bits_become_floats(name: str, tmp_path: Path) -> None:
    """Packed weights are those that transformers unpacks, states those of products with rounded
    inputs."""
    path = str(FORMATS[name](tmp_path))
    target = Target(path, CPU)
    unpacked = load_model(path, CPU, packed=False)
    own = unpacked.model.layers[1]
    weights = target.decoder_layer(1)
    assert len(weights) == 9
    parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    for each in (*parts, "post_attention_layernorm"):
        wanted = own.get_submodule(each).weight.float()
        torch.testing.assert_close(weights[each.split(".")[-1]], wanted, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(target.head, unpacked.lm_head.weight, rtol=1e-2, atol=1e-3)
    text = [1, 7, 30, 31, 5, 2]
    states = target.states(text)
    expected = own_states(unpacked, text)
    width = target.facts.hidden_size
    assert states.shape == (len(text), (len(target.layers) + 1) * width)
    near = functional.cosine_similarity(states[:, -width:].float(), expected[NORMED].float())
    # Rounded inputs move single states of a model this small, by how much is the CPU's kernels'.
    assert float(near.min()) > 0.95
    assert float(near.median()) > 0.99


def test_heads_learn_from_weights_in_few_bits(tmp_path: Path) -> None:
    """In the target's dtype throughout, and without gradients through it."""
    path = FORMATS["Q4_K_and_Q6_K_tied"](tmp_path)
    target = load_model(str(path), CPU)
    vocab_size = target.config.vocab_size
    rng = random.Random(0)
    rows = [[rng.randrange(vocab_size) for _ in range(20)] for _ in range(24)]
    lines = [json.dumps({"num_prompt": 4, "ids": row}) for row in rows]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    losses = []
    for kind in ("eagle3", "p_eagle"):
        out = tmp_path / kind
        options = f"--model {path} --kind {kind} --texts {tmp_path}/texts.jsonl --out {out}"
        heads.main([*options.split(), "--max-steps", "2", "--minutes", "100", "--rows", "64"])
        stored = load_file(out / "model.safetensors")
        assert stored["fc.weight"].dtype == target.dtype
        losses.append(all(bool(each.isfinite().all()) for each in stored.values()))
    assert losses == [True, True]
