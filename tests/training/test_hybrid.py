"""The tiny hybrid with its MTP layer: its checkpoint is one as they are published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from engine.drafting.facts import target_facts
from engine.drafting.published.mtp import read_mtp
from training.hybrid import SHAPE, HybridLearner, build, load

IDS = [5, 9, 3, 7, 7, 2, 11, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("hybrid")
    config = Qwen3_5TextConfig(vocab_size=40, tie_word_embeddings=True, **SHAPE)
    build(config).save_pretrained(path)
    return path


def test_an_engine_reads_the_saved_layer(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    own = {name for name in stored if name.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"} <= own
    assert not any("embed" in name and "norm" not in name for name in own)
    model = AutoModelForCausalLM.from_pretrained(folder)
    network = read_mtp(model, folder, target_facts(model))
    torch.testing.assert_close(network.join.weight, stored["mtp.fc.weight"])


def test_each_token_is_drafted_from_what_stands_before_it(folder: Path) -> None:
    """A token's loss depends on the tokens up to it; the first has none, since no state is before it."""
    learner = HybridLearner("hybrid", load(folder), 1e-3)
    ids = torch.tensor([IDS, IDS[::-1]])
    losses = learner.further_losses(ids, learner.log_probs(ids)).view(2, -1)
    assert losses.shape == (2, len(IDS) - 1)
    assert (losses[:, 0] == 0).all()
    ids[:, -2:] = 30  # the last is only to be said
    again = learner.further_losses(ids, learner.log_probs(ids)).view(2, -1)
    torch.testing.assert_close(again[:, :-1], losses[:, :-1])
    assert (again[:, -1] != losses[:, -1]).all()
