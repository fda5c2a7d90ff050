"""Files of other types hold what they are written from, as near as their bits allow."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from bench.gguf_types import FALLBACKS, KINDS, Shape, fitting, main, pack, rewrite, write_random
from engine.tokenizer import load_tokenizer
from engine.weights.gguf.blocks import GgufEmbedding, GgufWeight
from engine.weights.gguf.file import read_header
from engine.weights.gguf.loading import load_gguf, read_config
from worlds.gguf_files import TOKENS, tiny_llama, write_gguf

BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q8_0: 8} | {
    Kind.Q4_K: 4, Kind.Q5_K: 5, Kind.Q6_K: 6,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_are_near_what_they_were_packed_from(kind: Kind) -> None:
    random = np.random.default_rng(0)
    weights = random.normal(0, 1, (64, 512)).astype(np.float32)
    weights[3] = 0
    weights[4] = 0.5
    weights[5] *= 1e-3
    found = dequantize(pack(weights, kind), kind)
    errors = np.abs(found - weights).reshape(len(weights), -1, 32).max(-1)
    spreads = np.ptp(weights.reshape(len(weights), -1, 32), axis=-1)
    # A step and its rounding to 6 or 8 bits, where signs take half of the codes.
    assert float((errors[6:] / spreads[6:]).max()) < 1.3 / 2 ** BITS[kind]
    assert float(errors[5].max()) < 1e-3
    assert not found[3].any()
    assert float(errors[4].max()) < 0.01


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_rewritten_file_is_the_same_model_in_another_type(tmp_path: Path, kind: Kind) -> None:
    model = tiny_llama(hidden_size=256, intermediate_size=288)
    source = write_gguf(tmp_path / "source.gguf", Kind.Q8_0, model=model)
    target = tmp_path / "target.gguf"
    rewrite(source, target, kind)
    before, after = read_header(source), read_header(target)
    assert after.metadata == before.metadata
    assert list(after.tensors) == list(before.tensors)
    for own, made in zip(before.tensors.values(), after.tensors.values(), strict=True):
        assert made.shape == own.shape
        is_matrix = len(own.shape) == 2
        assert made.kind == (fitting(kind, own.shape[-1]).name if is_matrix else own.kind)
    own_kinds = {each.kind for each in after.tensors.values() if len(each.shape) == 2}
    assert own_kinds == {kind.name, FALLBACKS.get(kind, kind).name}
    up = load_gguf(target, *read_config(target), "auto").get_submodule("model.layers.1.mlp.up_proj")
    assert isinstance(up, GgufWeight)
    expected = dequantize(
        pack(model.model.layers[1].mlp.up_proj.weight.detach().numpy(), Kind.Q8_0), 8
    )
    assert np.array_equal(up.weight.numpy(), pack(expected, kind))


@pytest.mark.parametrize("vocabulary", [len(TOKENS) - 5, len(TOKENS) + 30], ids=["cut", "filled"])
def test_a_random_model_has_the_shape_that_was_asked_for(tmp_path: Path, vocabulary: int) -> None:
    source = write_gguf(tmp_path / "source.gguf")
    target = tmp_path / "target.gguf"
    write_random(source, target, Shape(256, 3, 512, 8, 2, vocabulary))
    loaded = load_gguf(target, *read_config(target), "auto")
    embedding = loaded.get_input_embeddings()
    head = loaded.get_output_embeddings()
    assert isinstance(embedding, GgufEmbedding)
    assert isinstance(head, GgufWeight)
    assert (embedding.num_embeddings, embedding.embedding_dim) == (vocabulary, 256)
    assert (embedding.scheme, head.scheme) == ("Q4_K", "Q6_K")
    down = [loaded.get_submodule(f"model.layers.{layer}.mlp.down_proj") for layer in range(3)]
    assert [getattr(each, "scheme", None) for each in down] == ["Q6_K", "Q4_K", "Q6_K"]
    spread = float(down[0].dequantized(torch.float32).std())  # type: ignore[operator]
    assert spread == pytest.approx(0.02, rel=0.1)
    tokenizer = load_tokenizer(str(target))
    assert len(tokenizer) == vocabulary
    assert tokenizer.decode(tokenizer.encode("hello 12")) == "hello 12"


def test_the_command_writes_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_gguf(tmp_path / "source.gguf", Kind.Q8_0))
    target = tmp_path / "target.gguf"
    monkeypatch.setattr(sys, "argv", ["gguf_types", source, str(target), "--type", "Q4_K"])
    main()
    assert {each.kind for each in read_header(target).tensors.values()} == {"F32", "Q5_0"}
    sizes = ["--width", "256", "--layers", "1", "--ffn", "256", "--heads", "4", "--kv-heads", "4"]
    options = ["gguf_types", source, str(target), "--random", "--vocabulary", "300", *sizes]
    gemma = ["--architecture", "gemma3", "--head-width", "64", "--width", "96"]
    monkeypatch.setattr(sys, "argv", [*options, *gemma])
    main()
    model = load_gguf(target, *read_config(target), "auto")
    assert model.config.model_type == "gemma3_text"
    projection = model.get_submodule("model.layers.0.self_attn.o_proj")
    assert isinstance(projection, GgufWeight)
    assert (projection.scheme, projection.in_features, projection.out_features) == ("Q4_K", 256, 96)
    monkeypatch.setattr(sys, "argv", options)
    main()
    assert read_header(target).metadata["llama.embedding_length"] == 256
    for wrong in (["--width", "100"], ["--experts", "4"]):
        monkeypatch.setattr(sys, "argv", [*options, *wrong])
        with pytest.raises(SystemExit):
            main()
