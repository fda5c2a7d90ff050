"""Larger copies that are written as checkpoints, and heads for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.scaled import main, save_scaled, save_scaled_head
from engine.drafting.published.eagle3 import read
from engine.drafting.published.folder import DraftFolder
from engine.model.loader import load_model, load_tokenizer
from engine.model.quantization import quantize_model
from engine.names import BUNDLED
from engine.weights.gguf.file import find_gguf, read_header
from worlds.plain_heads import PlainEagle, Sizes
from worlds.published_eagle3 import FACTS, Form, target_ends, written
from worlds.tiny_bench_model import tiny_tokenizer

PROMPT = list(range(20, 60))
SPLITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
"""SmolLM2's."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sizes are multiples of 32, the features of a block."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"pre_tokenizer": SPLITS}))
    return folder


@torch.inference_mode()
def logits(folder: Path, quantized: bool = False) -> torch.Tensor:
    model = load_model(str(folder), torch.device("cpu"), "float32", packed=False)
    if quantized:
        quantize_model(model)
    found: torch.Tensor = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits
    return found.float()


@pytest.mark.parametrize("block_type", ["q4_0", "q8_0"])
def test_a_file_of_blocks_says_what_the_small_one_of_the_same_type_says(
    small: Path, tmp_path: Path, block_type: str
) -> None:
    for width in (1, 4):
        save_scaled(str(small), width, block_type, tmp_path / str(width))
    first, second = (logits(tmp_path / str(width)) for width in (1, 4))
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-4)
    (file,) = (tmp_path / "4").iterdir()
    header = read_header(file)
    assert header.metadata["llama.embedding_length"] == 4 * 96
    assert header.metadata["llama.attention.head_count_kv"] == 1
    text = "def add(a, b):\n    return a + 1234\n"
    ids, wanted = (
        load_tokenizer(str(path))(text, add_special_tokens=False)["input_ids"]
        for path in (file, small)
    )
    assert ids == wanted


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folder_of_floats_says_the_same_also_where_it_is_quantised_at_start(
    small: Path, tmp_path: Path, quantized: bool
) -> None:
    for width in (1, 4):
        save_scaled(str(small), width, None, tmp_path / str(width))
    first, second = (logits(tmp_path / str(width), quantized) for width in (1, 4))
    torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-3)


def test_a_head_says_the_same_of_padded_states(tmp_path: Path) -> None:
    form = Form(draft_vocab=16)
    written(tmp_path / "small", form)
    save_scaled_head(tmp_path / "small", 4, tmp_path / "large")
    facts = replace(FACTS, hidden_size=4 * FACTS.hidden_size)
    assert read(DraftFolder.open(tmp_path / "large"), facts).token_map is not None
    config = json.loads((tmp_path / "large" / "config.json").read_text(encoding="utf-8"))
    assert config["rms_norm_eps"] == pytest.approx(1e-5 / 4)
    assert config["draft_vocab_size"] == 16
    embedding, head = target_ends()
    states = torch.randn(9, 3, FACTS.hidden_size, generator=torch.Generator().manual_seed(3))
    said = []
    for width, folder in ((1, tmp_path / "small"), (4, tmp_path / "large")):
        tensors = {
            name.replace("midlayer.", "layers.0."): each
            for name, each in load_file(folder / "model.safetensors").items()
        }
        ends = padded(embedding, width), padded(head, width)
        sizes = Sizes(4 * width, 2, form.head_dim, 10000.0)
        reading = PlainEagle(tensors, (0, 1, 2), sizes, ends)
        rows = reading.fuse(padded(states, width).flatten(1))
        said.append(reading.rows(range(9), rows)[1])
    torch.testing.assert_close(said[1], said[0], rtol=1e-3, atol=1e-3)


def padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, (width - 1) * rows.shape[-1]))


def test_the_command_writes_the_given_heads_beside_the_model(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = written(tmp_path / "head", Form())
    arguments = ["--model", str(small), "--gguf", "q4_0", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--draft", f"mine={head}"]) == 0
    drafts = f"mine={tmp_path / 'out' / 'mine'}"
    assert capsys.readouterr().out.split()[-3:] == [str(tmp_path / "out"), "--draft", drafts]
    assert (tmp_path / "out" / "mine" / "model.safetensors").is_file()
    assert find_gguf(str(tmp_path / "out")) is not None


def test_what_has_no_scaled_copy_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="power of four"):
        save_scaled(str(small), 2, None, tmp_path / "out")
    with pytest.raises(ValueError, match="only EAGLE-3"):
        save_scaled_head(BUNDLED / "medusa", 4, tmp_path / "out")
