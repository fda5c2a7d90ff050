"""``slipstream serve --draft`` with drafts that do not fit: one clear line on stderr, exit status 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.drafting.published.eagle3_network import Eagle3Network, Eagle3Spec
from engine.process.launch import child_environment
from slipstream.cli import main
from training.folders import write_eagle3
from worlds.published_blocks import PLAIN, block_tensors
from worlds.published_blocks import write_folder as write_block_folder
from worlds.tiny_bench_model import save_tiny_model, tiny_tokenizer

VOCAB, HIDDEN = 512, 32
SIZES: Any = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 2 layers, 32 dimensions and 512 tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("target"))


def write_eagle(path: Path, vocab_size: int = VOCAB) -> Path:
    torch.manual_seed(2)
    config = LlamaConfig(vocab_size=vocab_size, **SIZES)
    spec = Eagle3Spec(config, HIDDEN, ((0, 1, 2),), vocab_size, owns_embedding=True)
    write_eagle3(path, Eagle3Network(spec))
    return path


def write_dflash(path: Path) -> Path:
    config = PLAIN | {"vocab_size": VOCAB, "num_target_layers": 2}
    section = {"mask_token_id": 3, "target_layer_ids": [0, 0, 1]}
    write_block_folder(path, config | {"dflash_config": section}, block_tensors())
    return path


def with_config(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def cut(path: Path) -> Path:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    return path


def small_model_of_another_vocabulary(path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def text_file(path: Path) -> Path:
    path.write_text("no draft")
    return path


def folder_with(path: Path, name: str, content: str) -> Path:
    path.mkdir()
    (path / name).write_text(content)
    return path


# One of each way to a refusal; what heads' readers refuse is told by tests/engine/drafting/published.
FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a block head of a deeper model": (
        lambda path: with_config(write_dflash(path), num_target_layers=36),
        r"draft dflash: PATH: num_target_layers is 36, and this model has 2",
    ),
    "another vocabulary": (
        lambda path: write_eagle(path, vocab_size=500),
        r"draft eagle3: PATH: vocab_size is 500, and the target's is 512",
    ),
    "a cut header": (
        lambda path: cut(write_eagle(path)),
        r"PATH: model\.safetensors cannot be read: .*",
    ),
    "a configuration that is no JSON": (
        lambda path: folder_with(path, "config.json", "{'a': 1}"),
        r"PATH: config\.json cannot be read: .*",
    ),
    "a small model of another vocabulary": (
        small_model_of_another_vocabulary,
        r"draft model PATH: its vocabulary has 64 tokens, and its tokenizer writes 511",
    ),
    "a file": (text_file, r"cannot load 'PATH': it is a file, neither a model's folder nor GGUF"),
    "a folder of something else": (
        lambda path: folder_with(path, "readme.md", "no draft"),
        r"cannot load 'PATH': the folder holds no config\.json",
    ),
    "a configuration alone": (
        lambda path: folder_with(path, "config.json", '{"model_type": "llama"}'),
        r"PATH: there is neither model\.safetensors nor .*",
    ),
}


def refusal(capfd: pytest.CaptureFixture[str], target: Path, *flags: str) -> str:
    """Starts in this process; returns the one line that it says."""
    capfd.readouterr()
    quiet = ("--no-engine-process", "--log-level", "error", "--port", "0")
    assert main(["serve", str(target), *quiet, *flags]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("slipstream: ")
    return line.removeprefix("slipstream: ")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_does_not_fit_is_refused(
    name: str, target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write, told = FOLDERS[name]
    path = write(tmp_path / "draft")
    line = refusal(capfd, target, "--draft", str(path))
    assert re.fullmatch(told.replace("PATH", re.escape(str(path))), line), line


def test_drafts_that_cannot_be_told_apart_are_refused(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head, other = write_eagle(tmp_path / "a"), write_dflash(tmp_path / "b")

    def said(*drafts: str) -> str:
        return refusal(capfd, target, *(part for each in drafts for part in ("--draft", each)))

    twice = "draft: two are called {}; name one of them: NAME=PATH"
    assert said(str(head), str(head)) == twice.format("eagle3")
    assert said(f"x={head}", f"x={other}") == twice.format("x")
    assert said(f"eagle3={other}", str(head)) == twice.format("eagle3")
    for taken in ("ngram", "medusa", "auto", "none"):
        own = f", and {head} is of the method eagle3" if taken == "medusa" else ""
        assert said(f"{taken}={head}") == (
            f"draft {taken}: a drafter has that name{own}; name it otherwise"
        )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["Moon=PATH"], r".*'Moon' is not lower-case letters, digits and underscores.*"),
        (["moon="], r".*'moon=' names no path.*"),
        (["moon=nothing/here"], r".*nothing/here.*"),
        (["mtp"], r"draft mtp: TARGET: the checkpoint has no MTP module of a kind that is known"),
        (["x=HEAD", "--drafters", "ngram"], "draft x is set, but drafters leaves out x"),
        (
            ["x=HEAD", "--min-draft-agreement", "0.9"],
            r"draft x: .*; is it another model's\? \(min_draft_agreement is 0\.9\)",
        ),
    ],
)
def test_a_draft_that_cannot_be_is_refused(
    flags: list[str], told: str, target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = str(write_eagle(tmp_path / "a"))
    line = refusal(capfd, target, "--draft", *(each.replace("HEAD", head) for each in flags))
    assert re.fullmatch(told.replace("TARGET", re.escape(str(target))), line), line


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_refuses_the_same(target: Path, tmp_path: Path) -> None:
    path = write_eagle(tmp_path / "a", vocab_size=500)
    command = [sys.executable, "-m", "slipstream.cli", "serve", str(target), "--port", "0"]
    command += ["--draft", f"x={path}"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("slipstream: ")]
    assert said == [f"slipstream: draft x: {path}: vocab_size is 500, and the target's is 512"]
    assert "Traceback" not in done.stderr
