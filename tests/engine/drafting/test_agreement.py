"""Whether heads are found to fit: ones that read certain layers by construction, whatever their files
say, and ones of another model. Stores without room to ask are test_checked.py's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import NORMED
from engine.drafting.agreement import (
    OwnText,
    agreement,
    agreement_of_medusa,
    best_reading,
    write_texts,
)
from engine.drafting.block_model import BlockHead
from engine.drafting.draft_model import DraftLimits, EngineDraftModel
from engine.drafting.facts import target_facts
from engine.drafting.head_model import ChainHead, HeadModel
from engine.drafting.medusa import MedusaHeads
from engine.drafting.published.folder import DraftFolder
from engine.drafting.published.methods import method_of, read_network
from engine.drafting.published.networks import place
from worlds.taught_heads import (
    LAYERS,
    NUM_LAYERS,
    VOCAB,
    counting_target,
    prompts,
    taught_dflash,
    taught_eagle,
    taught_medusa,
)
from worlds.tiny_models import CPU, make_runner, own_logits, own_states

LIMITS = DraftLimits(VOCAB, 300, 256)
EVERY_LAYER = [NORMED, *range(NUM_LAYERS + 1)]
SEEDS = range(20)
KINDS: dict[str, Callable[..., Path]] = {"eagle3": taught_eagle, "dflash": taught_dflash}
SHIFTS = [("eagle3", 1), ("eagle3", -1), ("dflash", 1)]
"""Ways to count layers that files of a kind mix up."""


def bound_network(path: Path, target: PreTrainedModel) -> Any:
    method = method_of(DraftFolder.open(path))
    assert method is not None
    network = read_network(method, path, target_facts(target), target)
    place(network, CPU, torch.float32)
    network.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return network


def head_of(path: Path, target: PreTrainedModel, num_blocks: int = 96) -> HeadModel:
    network = bound_network(path, target)
    needs = AttentionNeeds("fast", CPU, torch.float32, 4, network.shapes)
    kind = BlockHead if hasattr(network, "block_size") else ChainHead
    return kind(network, build_attention(needs, num_blocks, "sdpa"), LIMITS)


def texts_of(seed: int, num_blocks: int = 96) -> list[OwnText]:
    runner = make_runner(counting_target(seed), exact=False, num_blocks=num_blocks)
    return write_texts(runner, prompts(seed, 10), EVERY_LAYER)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_layers_that_a_file_counts_wrongly_are_found(seed: int, tmp_path: Path) -> None:
    target, texts = counting_target(seed), texts_of(seed)
    for kind, shift in SHIFTS:
        head = head_of(KINDS[kind](tmp_path / f"{kind}{shift}", seed, shift), target)
        assert head.hidden_layers == tuple(layer + shift for layer in LAYERS)
        as_written = agreement(head, texts)
        layers, share = best_reading(head, texts)
        assert layers == head.hidden_layers == LAYERS
        assert as_written is not None
        assert share is not None
        assert share > as_written + 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_layers_that_a_file_counts_rightly_stay(kind: str, seed: int, tmp_path: Path) -> None:
    head = head_of(KINDS[kind](tmp_path, seed), counting_target(seed))
    layers, share = best_reading(head, texts_of(seed))
    assert (layers, head.candidate_layers[0]) == (LAYERS, LAYERS)
    assert share is not None
    assert share > 0.7


def test_texts_are_the_targets_own_and_so_are_their_states() -> None:
    target, texts = counting_target(3), texts_of(3)
    assert len(texts) == 8
    # A store takes memory where it is written: they lie side by side, whatever its size.
    places = [place for text in texts for place in text.block_table]
    assert places == list(range(len(places)))
    assert len(places) * 4 <= sum(len(text.token_ids) + 64 + 4 for text in texts)
    for text, prompt in zip(texts, prompts(3, 10), strict=False):
        assert (text.first, text.token_ids[: text.first]) == (len(prompt), prompt)
        assert len(text.token_ids) == len(prompt) + 16
        choices = own_logits(target, text.token_ids).argmax(-1).tolist()
        assert text.choices == choices
        assert text.token_ids[text.first :] == choices[text.first - 1 : -1]
        for layer, states in own_states(target, text.token_ids).items():
            torch.testing.assert_close(text.states[layer], states, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_agreement_is_the_share_of_places_with_the_targets_own_token(
    kind: str, tmp_path: Path
) -> None:
    """The share is computed by hand from the states of the token before each place."""
    head, texts = head_of(KINDS[kind](tmp_path, 0), counting_target(0)), texts_of(0)
    tensors = DraftFolder.open(tmp_path).read(["fc.weight", "lm_head.weight"])
    guesses, right = [], []
    for text in texts:
        states = torch.cat([text.states[layer] for layer in LAYERS], dim=1)
        fused = states @ tensors["fc.weight"].T
        scores = (fused / fused.norm(dim=1, keepdim=True)) @ tensors["lm_head.weight"].T
        for anchor in range(text.first, len(text.token_ids)):
            guesses.append(int(scores[anchor - 1].argmax()))
            right.append(text.choices[anchor])
    share = sum(map(int.__eq__, guesses, right)) / len(right)
    assert len(right) == 128
    assert agreement(head, texts) == pytest.approx(share, abs=1 / 128)
    assert share > 0.5


def test_a_model_agrees_with_itself_and_hardly_with_another() -> None:
    texts, target = texts_of(4), counting_target(4)

    def share(model: PreTrainedModel) -> float | None:
        runner = make_runner(model, exact=False)
        return agreement(EngineDraftModel(runner, LIMITS, owns_rows=True), texts)

    assert share(target) == 1
    other = copy.deepcopy(target)
    other.lm_head.weight.copy_(target.lm_head.weight.flip(0))
    assert share(other) == 0


def test_medusas_first_head_is_asked_for_what_follows_the_anchor(tmp_path: Path) -> None:
    texts = texts_of(6)
    right = bound_network(taught_medusa(tmp_path / "right", 6), counting_target(6))
    other = bound_network(taught_medusa(tmp_path / "other", 7), counting_target(6))
    share = agreement_of_medusa(MedusaHeads(right), texts)
    assert share is not None
    assert share > 0.9
    low = agreement_of_medusa(MedusaHeads(other), texts)
    assert low is not None
    assert low < 0.2
    assert agreement_of_medusa(MedusaHeads(right), []) is None


def test_nothing_is_kept_of_texts_that_were_asked(tmp_path: Path) -> None:
    for kind, write in KINDS.items():
        head = head_of(write(tmp_path / kind, 0), counting_target(0))
        best_reading(head, texts_of(0))
        assert all(not head.known(f"agreement-{number}") for number in range(8))
