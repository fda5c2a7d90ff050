"""Whole drafts of EAGLE-3, P-EAGLE and MTP in the engine, against plain readings of the same facts: first
and later steps, trees, accepted parts, prefix hits, chunks, rests and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from drafters.model.heads import Eagle3Drafter, MtpDrafter, PEagleDrafter
from engine.drafting.facts import target_facts
from engine.drafting.published.mtp import read_mtp
from engine.model.loader import load_model
from worlds.engine_harness import Setup
from worlds.head_runs import CPU, HeadWorld
from worlds.head_schedules import HeadSchedules, Make
from worlds.plain_heads import PlainMtp, Sizes, plain_eagle
from worlds.published_eagle3 import FACTS, P_EAGLE_TOKENS, Form, loaded

VOCAB = FACTS.vocab_size
LAYERS = (2, 5, 7)  # what a file means that names none, of 10


class Even(Form):
    """Its rows attend to all that they see, so that every missing one is noticed."""

    def tensors(self) -> dict[str, torch.Tensor]:
        found = super().tensors()
        return {name: each * (0.2 if "q_proj" in name else 1) for name, each in found.items()}


EAGLE = Even(draft_vocab=16)
P_EAGLE = Even(
    method="peagle",
    hidden_size=32,
    head_dim=10,
    num_layers=2,
    prefix="layers.0.",
    norms=("fc_norm.0", "fc_norm.1", "fc_norm.2"),
    owns_embedding=True,
    more={"mask_token_id": 7},
)


def eagle_world(path: Path, form: Form, shift: int = 0, **changes: Any) -> HeadWorld:
    """``shift``: of the layers that are read, against those that the file names."""
    network = loaded(path, form)
    assert network.hidden_layers == LAYERS
    network.hidden_layers = tuple(layer + shift for layer in LAYERS)
    reading = plain_eagle(form, network.hidden_layers)
    kind = PEagleDrafter if reading.is_parallel else Eagle3Drafter
    return HeadWorld(kind, network, reading, FACTS.hidden_size, VOCAB, **changes)


def mtp_world(path: Path, **changes: Any) -> HeadWorld:
    """MiMo's module, of a random layer of the target's own kind."""
    config = hf.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    torch.manual_seed(3)
    hf.Qwen2ForCausalLM(config).save_pretrained(path)
    file = path / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(17)

    def noise(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    layer = {
        name.removeprefix("model.layers.0."): (1 + noise(32) if "norm" in name else noise(*t.shape))
        for name, t in stored.items()
        if name.startswith("model.layers.0.")
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    layer |= {f"{name}.weight": 1 + noise(32) for name in norms}
    layer["input_proj.weight"] = noise(32, 64)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = 3 * noise(VOCAB, 32)
    module = {f"model.mtp_layers.0.{name}": each for name, each in layer.items()}
    save_file(stored | module, file, metadata={"format": "pt"})
    target = load_model(str(path), CPU)
    network = read_mtp(target, path, target_facts(target))
    network.bind(target.get_input_embeddings(), target.get_output_embeddings())
    ends = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    reading = PlainMtp(layer, Sizes(4, 2, 8, 500.0), ends)
    return HeadWorld(MtpDrafter, network, reading, 32, VOCAB, **changes)


HEADS = ("eagle3", "p_eagle", "mtp")


@pytest.fixture(params=HEADS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def world(**changes: Any) -> HeadWorld:
        if request.param == "mtp":
            return mtp_world(tmp_path, **changes)
        return eagle_world(tmp_path, EAGLE if request.param == "eagle3" else P_EAGLE, **changes)

    return world


@pytest.fixture
def make_few(make: Make) -> Make:
    """All of them: they are few."""
    return make


class TestHeads(HeadSchedules):
    vocab_size = VOCAB
    fewest_drafts = 4

    def test_at_the_end_of_the_slots_there_are_fewer_masks(self, tmp_path: Path) -> None:
        world = eagle_world(tmp_path, P_EAGLE, setup=Setup(num_blocks=10, max_model_len=40))
        world.finished(world.ask("r", self.prompt(1, 20), max_tokens=20))
        assert world.fewest_positions < P_EAGLE_TOKENS

    @pytest.mark.parametrize("first", [1, -1])
    def test_another_reading_of_the_file_reads_other_states(
        self, first: int, tmp_path: Path
    ) -> None:
        world = eagle_world(tmp_path, EAGLE, shift=first)
        assert world.drafter.hidden_layers == tuple(layer + first for layer in LAYERS)
        world.finished(world.ask("r", self.prompt(1)))
