"""MTP modules of GGUF files, as llama.cpp's conversion writes them, beside readings of the tensors that
they were written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.drafting.drafts import find_drafts
from engine.drafting.facts import target_facts
from engine.drafting.heads import prepare_heads
from engine.drafting.published.folder import DraftRefusedError
from engine.drafting.published.methods import brings_mtp, read_network
from engine.drafting.published.mtp_network import MtpNetwork
from engine.model.loader import load_model
from engine.model.quantization import has_packed_weights
from engine.weights.gguf.file import read_header
from engine.weights.gguf.mtp import MtpLayer
from engine.weights.gguf.parameters import bytes_of
from worlds.gguf_conversion import tensors_of, write_converted
from worlds.mtp_modules import (
    FAMILIES,
    HIDDEN,
    NUM_LAYERS,
    TEXT,
    Served,
    check_whole,
    donor,
    own_model,
    own_parts,
    target_states,
)
from worlds.tiny_models import CPU, VOCAB_SIZE

ARCHITECTURES = {
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
START = f"blk.{NUM_LAYERS}."
Tensors = dict[str, Any]


def module_tensors(name: str) -> Tensors:
    """The layer behind the model's own."""
    tensors = tensors_of(ARCHITECTURES[name], donor(name))
    found = {
        f"{START}{key.removeprefix('blk.0.')}": each
        for key, each in tensors.items()
        if key.startswith("blk.0.")
    }
    token_norm, hidden_norm, join = (each.numpy() for each in own_parts())
    offset = FAMILIES[name].offset
    own = {"enorm": token_norm + offset, "hnorm": hidden_norm + offset, "eh_proj": join}
    own["shared_head_norm"] = tensors["output_norm.weight"]
    return found | {f"{START}nextn.{key}.weight": each for key, each in own.items()}


def write(
    path: Path, name: str, kind: Kind = Kind.F32, change: Callable[[Tensors], object] = len
) -> Path:
    architecture = ARCHITECTURES[name]
    model = own_model(FAMILIES[name].config(num_hidden_layers=NUM_LAYERS), seed=0)

    def with_module(tensors: Tensors) -> None:
        tensors |= module_tensors(name)
        change(tensors)

    said = {f"{architecture}.block_count": NUM_LAYERS + 1}
    said[f"{architecture}.nextn_predict_layers"] = 1
    return write_converted(path, architecture, model, kind, said, with_module)


def read(path: Path, packed: bool = True) -> tuple[MtpNetwork, PreTrainedModel]:
    target = load_model(str(path), CPU, "float32", packed=packed)
    network: MtpNetwork = read_network("mtp", path, target_facts(target), target)
    network.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return network, target


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_those_of_a_plain_reading(tmp_path: Path, name: str) -> None:
    network, target = read(write(tmp_path / "tiny.gguf", name))
    found = check_whole(name, network, target)
    head = target.get_output_embeddings().weight
    torch.testing.assert_close(network.logits(found), found @ head.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_a_module_keeps_the_files_bits(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "tiny.gguf", name, Kind.Q8_0)
    network, target = read(path)
    assert has_packed_weights(target) == has_packed_weights(network.body)
    plain, floats = read(path, packed=False)
    assert not has_packed_weights(plain)
    features = target_states(floats)[:-1]
    rows, wanted = (Served(each).run(TEXT[1:], features) for each in (network, plain))
    assert float((rows - wanted).norm() / wanted.norm()) < 0.05


def test_who_serves_such_a_file_is_told_of_its_draft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_5")
    target = load_model(str(path), CPU, "float32")
    for draft, is_told in ((), True), (("mtp",), False):
        config = EngineConfig(model=str(path), draft=draft)
        caplog.clear()
        with caplog.at_level("INFO"):
            heads = prepare_heads(target, config, find_drafts(config))
        assert [*heads.networks] == [*draft]
        assert ("--draft mtp drafts with it" in caplog.text) == is_told
    assert not brings_mtp(path, NUM_LAYERS + 1)


def test_ends_of_its_own_are_used_and_the_models_again_take_no_memory(tmp_path: Path) -> None:
    own = torch.randn(2, VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(9)).numpy()
    names = [f"{START}nextn.{each}.weight" for each in ("embed_tokens", "shared_head_head")]

    def with_ends(tensors: Tensors) -> None:
        tensors |= dict(zip(names, own, strict=True))

    def again(tensors: Tensors) -> None:
        theirs = (tensors[each] for each in ("token_embd.weight", "output.weight"))
        tensors |= dict(zip(names, theirs, strict=True))

    network, target = read(write(tmp_path / "own.gguf", "glm4_moe", change=with_ends))
    assert network.own_embed is not None
    assert torch.equal(network.own_embed.weight, torch.from_numpy(own[0]))
    states = torch.randn(3, HIDDEN)
    torch.testing.assert_close(network.logits(states), states @ torch.from_numpy(own[1]).T)
    network, target = read(write(tmp_path / "again.gguf", "glm4_moe", change=again))
    assert network.own_embed is network.own_head is None
    check_whole("glm4_moe", network, target)


def test_without_a_norm_of_its_own_it_has_the_models(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tiny.gguf",
        "qwen3_5",
        change=lambda tensors: tensors.pop(f"{START}nextn.shared_head_norm.weight"),
    )
    layer = MtpLayer(header := read_header(path), NUM_LAYERS)
    norms = layer.as_model().tensors["output_norm.weight"], header.tensors["output_norm.weight"]
    assert bytes_of(norms[0]).tolist() == bytes_of(norms[1]).tolist()


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("nextn.eh_proj", "the file has no multi-token-prediction layer"),
        ("nextn.enorm", r"blk.2.nextn.enorm.weight is missing"),
        ("attn_q", "1 tensors that the configuration asks for are missing: .*q_proj.weight"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, part: str, fault: str) -> None:
    path = write(
        tmp_path / "tiny.gguf",
        "qwen3_5",
        change=lambda tensors: tensors.pop(f"{START}{part}.weight"),
    )
    with pytest.raises(DraftRefusedError, match=f"tiny.gguf: its MTP module: {fault}"):
        read(path)


def test_a_part_of_another_shape_is_refused(tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors[f"{START}nextn.eh_proj.weight"] = tensors[f"{START}nextn.eh_proj.weight"][:32]

    path = write(tmp_path / "tiny.gguf", "qwen3_5", change=halve)
    with pytest.raises(
        DraftRefusedError, match=r"eh_proj.weight \[32, 128\] instead of \[64, 128\]"
    ):
        read(path)
