"""GGUF files as models: what is read, and what is refused in a line before anything believes it."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.quantization_config import GgufConfig

from bench.gguf_types import fitting
from engine.model.loader import eos_token_ids, load_model, load_tokenizer, sampling_defaults
from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.blocks import BLOCK_TYPES
from engine.weights.gguf.file import find_gguf, read_header
from engine.weights.gguf.loading import load_gguf, read_config, stored_dtype
from slipstream.cli import main
from worlds.gguf_files import (
    CONTROL,
    LLAMA3,
    NUM_LAYERS,
    TEMPLATE,
    TOKENS,
    Tensors,
    any_model,
    meant,
    places_of,
    split_in_three,
    tiny_llama,
    write_any,
    write_gguf,
)
from worlds.lanes import examples

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
IDS = torch.tensor([[5, 200, 31, 77, 140, 9, 9, 60]])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound file in float32."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


# --- what is read ---


def test_a_file_is_the_model_that_it_was_written_from(written: Path) -> None:
    loaded = load_model(str(written), CPU)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(tiny_llama()))
    assert not hasattr(loaded, "hf_quantizer")
    assert not hasattr(loaded.config, "quantization_config")


BLOCKS = [
    GGMLQuantizationType[each.name]
    for each in BLOCK_TYPES.values()
    if not each.name.startswith("IQ4")  # which nothing here writes
]


def wide_llama(tied: bool) -> LlamaForCausalLM:
    """Rows of 256 values, and down projections of 288, which types with blocks of 256 do not fit."""
    model = tiny_llama(hidden_size=256, intermediate_size=288, tie_word_embeddings=tied)
    for each in model.modules():
        if isinstance(each, LlamaRMSNorm):
            each.weight.data.uniform_(0.5, 1.5)
    return model


def load_packed(path: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    return load_gguf(path, *read_config(path), dtype)


def as_transformers_reads(path: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    return loaded


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_stay_packed_and_mean_what_transformers_reads(
    tmp_path: Path, kind: GGMLQuantizationType, tied: bool
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind, model=wide_llama(tied))
    theirs = as_transformers_reads(path)
    loaded = load_packed(path)
    places = places_of(loaded)
    assert loaded.dtype == torch.bfloat16
    assert len(places) == 7 * NUM_LAYERS + 2
    assert {each.weight.dtype for each in places.values()} == {torch.uint8}
    for place in places.values():
        assert place.scheme == fitting(kind, place.in_features).name
    shares = places["lm_head"].weight is places["model.embed_tokens"].weight
    assert shares == loaded.config.tie_word_embeddings == tied
    whole = load_model(str(path), CPU, "bfloat16", packed=False)
    expected = theirs.state_dict()
    for found in (meant(loaded), whole.state_dict()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(logits(whole), logits(theirs))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("architecture", "model_type", "sizes", "num_packed"),
    [
        ("llama", "llama", {}, 7 * NUM_LAYERS + 2),
        ("qwen2", "qwen2", {}, 7 * NUM_LAYERS + 2),  # with biases
        ("qwen3", "qwen3", {"head_dim": 128}, 7 * NUM_LAYERS + 2),
        ("nemotron", "nemotron", {}, 6 * NUM_LAYERS + 2),  # norms are stored less one
        ("gemma3", "gemma3_text", {}, 7 * NUM_LAYERS + 2),  # its embedding scales what it looks up
    ],
)
def test_architectures_are_read_as_transformers_reads_them(
    tmp_path: Path,
    architecture: str,
    model_type: str,
    sizes: dict[str, Any],
    num_packed: int,
    tied: bool,
) -> None:
    model = any_model(model_type, tie_word_embeddings=tied, **sizes)
    path = write_any(tmp_path / "any.gguf", architecture, model, GGMLQuantizationType.Q8_0)
    expected = as_transformers_reads(path).state_dict()
    for packed in (True, False):
        loaded = load_gguf(path, *read_config(path), "auto", packed)
        assert len(places_of(loaded)) == (num_packed if packed else 0)
        found = meant(loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_other_types_are_dequantised_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = GGMLQuantizationType.TQ1_0
    path = write_gguf(
        tmp_path / "tiny.gguf",
        GGMLQuantizationType.Q4_0,
        model=wide_llama(True),
        kinds={f"blk.{layer}.ffn_up.weight": kind for layer in range(NUM_LAYERS)},
    )
    with caplog.at_level("INFO", "engine.weights.gguf.reading"):
        loaded = load_packed(path)
    assert caplog.messages == ["dequantised: 2 tensors of type TQ1_0"]
    assert len(places_of(loaded)) == 7 * NUM_LAYERS
    up = loaded.get_submodule("model.layers.1.mlp.up_proj")
    assert type(up) is nn.Linear
    own = wide_llama(True).model.layers[1].mlp.up_proj.weight.detach().numpy()
    assert torch.equal(
        up.weight, torch.from_numpy(dequantize(quantize(own, kind), kind)).bfloat16()
    )


def test_blocks_with_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    header = read_header(path)
    broken = bytearray(path.read_bytes())
    for name in ("blk.1.ffn_up.weight", "token_embd.weight"):
        start = header.tensors[name].start
        broken[start + 34 : start + 36] = b"\x00\x7c"
    path.write_bytes(broken)
    with pytest.raises(UnsupportedModelError, match="not finite: ") as caught:
        load_packed(path)
    assert "model.embed_tokens.weight, model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "weights that are not finite: " in refusal(path)


def test_a_vocabulary_that_is_not_said_is_the_tokenizers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", values={"llama.vocab_size": None})
    assert torch.equal(logits(load_model(str(path), CPU)), logits(tiny_llama()))


def test_the_type_is_the_files_where_it_holds_values(tmp_path: Path) -> None:
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for kind, dtype in (kinds | {"Q4_1": torch.bfloat16}).items():
        path = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
        assert stored_dtype(read_header(path)) == dtype


def test_a_folder_with_one_file_is_that_file(tmp_path: Path, written: Path) -> None:
    """Unless it has weights of another kind. A file is known by how it begins."""
    (tmp_path / "blob").write_bytes(written.read_bytes())
    assert find_gguf(str(tmp_path)) is None
    assert find_gguf(str(tmp_path / "blob")) == tmp_path / "blob"
    (tmp_path / "blob").rename(tmp_path / "any.gguf")
    assert torch.equal(logits(load_model(str(tmp_path), CPU)), logits(tiny_llama()))
    assert load_tokenizer(str(tmp_path)).get_vocab() == load_tokenizer(str(written)).get_vocab()
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(str(tmp_path)) is None


def test_parts_of_a_file_are_one_model(tmp_path: Path, written: Path) -> None:
    paths = split_in_three(written, tmp_path)
    expected = logits(load_model(str(written), CPU))
    for name in (tmp_path, paths[0], paths[2]):
        assert find_gguf(str(name)) == paths[0]
        assert torch.equal(logits(load_model(str(name), CPU)), expected)
    assert len(load_tokenizer(str(tmp_path))) == len(TOKENS)
    data = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    assert refused_by_both(tmp_path).endswith("tiny-00002-of-00003.gguf is not part 2 of 3")
    paths[1].write_bytes(data[:-1])
    assert "the file ends in its data" in refused_by_both(tmp_path)
    paths[1].unlink()
    said = refused_by_both(tmp_path)
    assert said.endswith("part 2 of 3 is missing: tiny-00002-of-00003.gguf")


def test_special_tokens_template_and_ends_are_the_files(written: Path) -> None:
    tokenizer = load_tokenizer(str(written))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.chat_template == TEMPLATE
    added = tokenizer.added_tokens_decoder.values()
    assert {str(each) for each in added if each.special} == set(CONTROL)
    assert len(tokenizer) == len(TOKENS)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert tokenizer.encode(text)[0] == 1
    assert tokenizer.encode(text)[-2] == 2
    # <|eot_id|> by its name.
    assert eos_token_ids(load_model(str(written), CPU), tokenizer) == (2, 3)


def test_the_ends_and_the_sampling_that_a_file_says_are_taken(tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.05, "mirostat": 0}
    values = {f"general.sampling.{key}": value for key, value in sampling.items()}
    marks = {"eot": 7, "fim_pre": 8, "fim_suf": 9, "fim_mid": 10}
    values |= {f"tokenizer.ggml.{name}_token_id": number for name, number in marks.items()}
    path = str(write_gguf(tmp_path / "tiny.gguf", values=values))
    assert load_tokenizer(path).init_kwargs["infill_tokens"] == [TOKENS[8:11]]
    model = load_model(path, CPU)
    assert eos_token_ids(model, None) == (2, 3, 7)
    assert sampling_defaults(model) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


def test_the_servers_tokenizer_needs_no_torch(written: Path) -> None:
    code = (
        "import sys; from engine.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(written)!r}); assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_divided_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp's conversion stores by what each frequency is divided in place of how they are scaled."""
    scaled = tiny_llama(rope_parameters=LLAMA3)
    factors = tiny_llama().model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    assert float(factors.max()) > 1

    def add_factors(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = factors.numpy()

    path = write_gguf(tmp_path / "tiny.gguf", change_tensors=add_factors)
    found = logits(load_model(str(path), CPU))
    torch.testing.assert_close(found, logits(scaled), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, logits(tiny_llama()), rtol=1e-2, atol=1e-2)


# --- what is refused ---


def load(name: str) -> PreTrainedModel:
    return load_model(name, CPU)


def refusal(path: Path, load: Callable[[str], object] = load) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load(str(path))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"cannot load {str(path)!r}: ")
    return said


def refused_by_both(path: Path) -> str:
    """Returns the refusal of the engine, which reads the whole file; the server's is the same."""
    said = refusal(path)
    assert refusal(path, load_tokenizer) == said
    return said


def parts_of(path: Path) -> dict[str, int]:
    """Where each part of a file begins."""
    data = path.read_bytes()
    first = min(tensor.start for tensor in read_header(path).tensors.values())
    return {
        "header": 0,
        "metadata": 24,
        "list of tensors": data.index(b"token_embd.weight") - 8,
        "data": first,
        "end": len(data),
    }


@pytest.mark.parametrize(
    ("part", "further"),
    [("header", 11), ("metadata", 400), ("list of tensors", 40), ("data", 1), ("end", -1)],
)
def test_a_cut_file_is_refused_wherever_it_is_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], written: Path, part: str, further: int
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(written.read_bytes()[: parts_of(written)[part] + further])
    said = refused_by_both(cut)
    assert "the file ends in its " in said or "it is cut or damaged" in said
    assert (
        main(["serve", str(cut), "--no-engine-process", "--log-level", "error", "--port", "0"]) == 2
    )
    assert capfd.readouterr().err == f"slipstream: {said}\n"


@given(st.data())
def test_no_cut_file_passes(written: Path, data: st.DataObject) -> None:
    parts = parts_of(written)
    whole = written.read_bytes()
    cut = written.with_name("cut.gguf")
    cut.write_bytes(whole[: data.draw(st.integers(0, parts["end"] - 1))])
    with pytest.raises(UnsupportedModelError):
        read_header(cut)


@cache
def fields_of(path: Path) -> list[int]:
    """Where the numbers of 8 bytes are that a header is read by: counts, lengths, sizes and offsets."""
    header, data = read_header(path), path.read_bytes()
    found = [8, 16]
    for key, (first, _) in header.spans.items():
        kind_at = first + 8 + len(key.encode())
        (kind,) = struct.unpack_from("<I", data, kind_at)
        found += [first, kind_at + (8 if kind == 9 else 4)]
    at = max(end for _, end in header.spans.values())
    for tensor in header.tensors.values():
        found.append(at)
        at += 8 + len(tensor.name.encode()) + 4
        found += [at + 8 * each for each in range(len(tensor.shape))]
        at += 8 * len(tensor.shape) + 4
        found.append(at)
        at += 8
    return found


EDGES = [(1 << bits) - less for bits in (31, 32, 62, 63, 64) for less in (1, 32)]
EXTREMES = [0, 1, 7, 31, 33, *EDGES]


@st.composite
def damaged(draw: st.DrawFn, written: Path) -> bytes:
    """The file with up to four faults: any bytes, extremes for numbers that it is read by, or cut."""
    data = bytearray(written.read_bytes())
    fields, end = fields_of(written), max(fields_of(written)) + 8
    for _ in range(draw(st.integers(1, 4))):
        fault = draw(st.sampled_from(["bytes", "number", "kind", "cut"]))
        if fault == "bytes":
            at = draw(st.integers(0, end - 8))
            some = draw(st.binary(min_size=1, max_size=8))
            data[at : at + len(some)] = some
        elif fault == "cut":
            del data[draw(st.integers(end // 2, len(data))) :]
            data.extend(bytes(max(0, end - len(data))) if draw(st.booleans()) else b"")
        else:
            width = 8 if fault == "number" else 4
            at = draw(st.sampled_from(fields)) - 8 + width
            value = draw(st.sampled_from(EXTREMES) | st.integers(0, (1 << 64) - 1))
            some = struct.pack("<Q", value)[:width]
            if at + width <= len(data):
                data[at : at + width] = some
    return bytes(data)


@settings(max_examples=examples(1200, 6000))
@given(st.data())
def test_damage_is_refused_or_harmless_and_takes_no_memory(
    written: Path, data: st.DataObject
) -> None:
    path = written.with_name("broken.gguf")
    broken = data.draw(damaged(written))
    path.write_bytes(broken)
    tracemalloc.start()
    try:
        with suppress(UnsupportedModelError):
            header = read_header(path)
            tensors = header.tensors.values()
            ends = [each.start + each.num_bytes for each in tensors]
            assert max(ends, default=0) <= len(broken)
            assert sum(each.num_bytes for each in tensors) <= len(broken)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Values as Python holds them: some 350 bytes for the smallest entry, which has 13.
    assert peak < 40 * len(broken) + (1 << 20)


@given(st.data())
def test_a_damaged_file_is_a_model_or_one_line(written: Path, data: st.DataObject) -> None:
    path = written.with_name("broken.gguf")
    path.write_bytes(data.draw(damaged(written)))
    said = ""
    try:
        load_model(str(path), CPU)
    except UnsupportedModelError as error:
        said = str(error)
    assert "\n" not in said


def overwritten(written: Path, target: Path, before: bytes, skip: int, value: int) -> Path:
    """The file with 8 bytes replaced that come ``skip`` after the first ``before``."""
    data = bytearray(written.read_bytes())
    at = data.index(before) + len(before) + skip
    data[at : at + 8] = struct.pack("<Q", value)
    target.write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("before", "skip", "value", "part"),
    [
        (b"GGUF", 4, 1 << 60, f"counts {1 << 60} tensors"),
        (b"GGUF", 12, 1 << 62, f"counts {1 << 62} metadata values"),
        (b"general.architecture", 4, 1 << 61, f"{1 << 61} bytes more should follow"),
        (b"tokenizer.ggml.tokens", 8, 1 << 59, "elements of 'tokenizer.ggml.tokens'"),
        (b"tokenizer.ggml.token_type", 8, 1 << 63, "elements of 'tokenizer.ggml.token_type'"),
        (b"token_embd.weight", 4, 1 << 63, "the file ends in its data"),
        (b"token_embd.weight", 4, 0, "has the shape [0, "),
        (b"token_embd.weight", 24, 1 << 62, "the file ends in its data"),
        (b"token_embd.weight", 24, 33, "begins at 33, no multiple of 32"),
        (b"blk.1.ffn_up.weight", 24, 64, "overlap"),
        (b"blk.0.attn_q.weight", 20, 777, "tensor 'blk.0.attn_q.weight' has the unknown type 777"),
    ],
)
def test_absurd_sizes_and_types_are_refused_before_anything_believes_them(
    tmp_path: Path, written: Path, before: bytes, skip: int, value: int, part: str
) -> None:
    assert part in refused_by_both(
        overwritten(written, tmp_path / "absurd.gguf", before, skip, value)
    )


def test_long_arrays_are_refused_though_the_file_has_them(tmp_path: Path) -> None:
    """A parser would loop over them for minutes."""
    path = write_gguf(tmp_path / "long.gguf", values={"some.bytes": "x"})
    key = b"some.bytes" + struct.pack("<I", 8) + struct.pack("<Q", 1) + b"x"
    long = b"some.bytes" + struct.pack("<IIQ", 9, 0, 1 << 23) + bytes(1 << 23)
    path.write_bytes(path.read_bytes().replace(key, long))
    assert "more than 4194304 elements, up to 'some.bytes'" in refused_by_both(path)


def test_more_tensors_than_any_model_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 18, 0) + bytes(24 << 18))
    assert f"{1 << 18} tensors; read are at most" in refused_by_both(path)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def as_whole_numbers(tensors: Tensors) -> None:
    tensors["blk.0.attn_norm.weight"] = np.ones(64, dtype=np.int8)


def add_bias(tensors: Tensors) -> None:
    tensors["blk.0.attn_q.bias"] = np.ones(64, dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "change", "part"),
    [
        (
            {"general.architecture": "plamo"},
            None,
            "architecture 'plamo' are not read; docs/gguf.md has those that are, docs/extend.md how to",
        ),
        (
            {"llama.block_count": 1 << 30},
            None,
            f"{1 << 30} layers, and it has tensors of {NUM_LAYERS}",
        ),
        ({"llama.block_count": "2"}, None, "its llama.block_count is '2'"),
        ({"llama.vocab_size": 0.5}, None, "its llama.vocab_size is 0.5"),
        ({"llama.block_count": 1}, None, f"1 layers, and it has tensors of {NUM_LAYERS}"),
        ({"llama.feed_forward_length": 1 << 31}, None, "6 tensors have other shapes"),
        ({"llama.vocab_size": 1 << 31}, None, f"says {1 << 31} tokens, and its embedding"),
        ({"llama.attention.head_count": 1 << 20}, None, "hidden size (64)"),
        ({"llama.embedding_length": 128}, None, "tensors have other shapes"),
        (
            {"llama.rope.scaling.type": "yarn"},
            None,
            "its rotary embedding is scaled (yarn, by None)",
        ),
        (
            {"tokenizer.ggml.tokens": [*TOKENS, "more"]},
            None,
            f"{len(TOKENS) + 1} tokens, and its embedding",
        ),
        ({}, drop("blk.1.ffn_up.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        ({}, drop("token_embd.weight"), "missing: model.embed_tokens.weight"),
        ({}, add_bias, "missing: model.layers.0.self_attn.k_proj.bias"),
        ({}, as_whole_numbers, "'blk.0.attn_norm.weight' is of the type I8, which is not read"),
    ],
)
def test_tensors_that_are_not_the_configurations_are_refused(
    tmp_path: Path, values: dict[str, Any], change: Callable[[Tensors], object] | None, part: str
) -> None:
    path = write_gguf(
        tmp_path / "odd.gguf", values=values, change_tensors=change or (lambda _: None)
    )
    assert part in refusal(path)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"tokenizer.ggml.tokens": None}, "the file holds no tokenizer"),
        ({"tokenizer.ggml.model": "abacus"}, "abacus"),
        ({"tokenizer.ggml.eos_token_id": 1 << 20}, f"tokenizer.ggml.eos_token_id is {1 << 20}"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(
    tmp_path: Path, values: dict[str, Any], part: str
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", values=values)
    assert part in refusal(path, load_tokenizer)


def test_weights_are_not_divided_among_ranks(written: Path) -> None:
    said = refusal(written, lambda name: load_model(name, CPU, num_ranks=2))
    assert said.endswith("the weights of GGUF files are not divided among ranks")


def test_two_files_in_a_folder_are_refused(tmp_path: Path, written: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(written.read_bytes())
    said = refused_by_both(tmp_path)
    assert said.endswith("the folder holds 2 GGUF files (a.gguf, b.gguf): name one of them")
    assert find_gguf(str(tmp_path / "b.gguf")) == tmp_path / "b.gguf"


def test_a_missing_package_is_named_with_its_extra(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = refusal(written)
    assert said.endswith("GGUF files need gguf: pip install -e '.[gguf]'")
