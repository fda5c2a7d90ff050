"""Checkpoints that become GGUF files, and come back as floats."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.peers.model_files import Models, find_heads, model_files
from bench.peers.place import PeerUnavailableError
from engine.model.loader import load_model
from engine.names import BUNDLED
from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import read_header
from worlds.tiny_bench_model import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source") / "tiny")


def made(folder: Path, block_type: str | None, cache: Path) -> Models:
    return model_files(str(folder), None, block_type, cache, num_threads=1)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def rounded(weight: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Returns the matrix as blocks of this type hold it."""
    values = dequantize(quantize(weight.numpy(), kind), kind)
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_all_get_the_weights_of_the_file(folder: Path, tmp_path: Path, kind: str) -> None:
    found = made(folder, kind, tmp_path)
    assert found.gguf.name == f"tiny-{kind}.gguf"
    original, target = weights(folder), weights(found.target)
    assert original.keys() == target.keys()
    block_type = GGMLQuantizationType[kind.upper()]
    for name, weight in original.items():
        # Queries' and keys' rows change places in the file: blocks lie along rows and stay what they are.
        of_rows = GGMLQuantizationType.Q8_0 if "embed_tokens" in name else block_type
        wanted = rounded(weight, of_rows) if weight.ndim == 2 else weight
        assert torch.equal(target[name], wanted.bfloat16().float()), name


def test_a_file_is_written_once_and_read_by_this_engine(folder: Path, tmp_path: Path) -> None:
    found = made(folder, "q8_0", tmp_path)
    taken = found.gguf.stat().st_mtime_ns
    assert made(folder, "q8_0", tmp_path) == found
    assert found.gguf.stat().st_mtime_ns == taken
    assert made(folder, "q4_0", tmp_path).gguf != found.gguf
    header = read_header(found.gguf)
    assert header.metadata["general.file_type"] == 7
    ours = load_model(str(found.gguf), torch.device("cpu"))
    assert ours.config.num_hidden_layers == 2
    text = "def add(a, b):\n    return a + b\n"
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, found.target)]
    first, second = (tokenizer(text)["input_ids"] for tokenizer in tokenizers)
    assert first == second


def test_a_file_of_others_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    file = made(folder, "q4_0", tmp_path / "one").gguf
    for model in (file, file.parent):
        again = made(model, None, tmp_path / "two")
        assert again.gguf == file
        assert weights(again.target).keys() == weights(folder).keys()
    with pytest.raises(UnsupportedModelError, match="blocks already"):
        made(file, "q8_0", tmp_path / "two")


def test_a_folder_of_floats_stays_itself(folder: Path, tmp_path: Path) -> None:
    assert made(folder, None, tmp_path) == Models(folder, None, None)


def test_who_cannot_write_a_type_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types of llama.cpp's own tool need it; the environment looks as if it were there, without a
    compiler."""
    peer = tmp_path / "llama.cpp"
    peer.mkdir()
    (peer / "installed.txt").write_text("gguf\nsafetensors\nnumpy\ncmake\nninja")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "rm").symlink_to(shutil.which("rm") or "/bin/rm")
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(PeerUnavailableError, match="compiler"):
        made(folder, "q4_k_m", tmp_path)


def test_heads_that_come_with_a_model_and_those_given_are_found_by_name(folder: Path) -> None:
    own = BUNDLED / "smollm2_eagle3"
    assert find_heads("smollm2", []) == {"eagle3": own}
    found = find_heads("bundled", [f"second={own}"])
    assert found == {"second": own, "medusa": BUNDLED / "medusa"}
    assert find_heads(str(folder), [f"small={folder}"]) == {}, "that is a model"
    with pytest.raises(ValueError, match="two are called second"):
        find_heads("scaled", [f"second={own}"] * 2)
