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
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.drafting.published.eagle3_network import Eagle3Network, Eagle3Spec
from engine.process.launch import child_environment
from slipstream.cli import main
from training.folders import write_eagle3
from worlds.published_blocks import PLAIN, block_tensors
from worlds.published_blocks import write_folder as write_block_folder
from worlds.tiny_bench_model import save_tiny_model, tiny_tokenizer

VOCAB, HIDDEN = 512, 32
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 2 layers, 32 dimensions and 512 tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("target"))


def write_eagle(path: Path, hidden_size: int = HIDDEN, vocab_size: int = VOCAB) -> Path:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    spec = Eagle3Spec(config, hidden_size, ((0, 1, 2),), vocab_size, owns_embedding=True)
    write_eagle3(path, Eagle3Network(spec))
    return path


def write_dflash(path: Path, **nested: Any) -> Path:
    config = PLAIN | {"vocab_size": VOCAB, "num_target_layers": 2}
    section = {"mask_token_id": 3, "target_layer_ids": [0, 0, 1]} | nested
    write_block_folder(path, config | {"dflash_config": section}, block_tensors())
    return path


def with_config(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def with_tensors(path: Path, **changes: torch.Tensor) -> Path:
    file = path / "model.safetensors"
    save_file(load_file(file) | changes, file)
    return path


def cut(path: Path, count: int) -> Path:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:count])
    return path


def small_model_of_another_vocabulary(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def text_file(path: Path) -> Path:
    path.write_text("no draft")
    return path


def folder_with(path: Path, name: str, content: str) -> Path:
    path.mkdir()
    (path / name).write_text(content)
    return path


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a head of a wider model": (
        lambda path: write_eagle(path, hidden_size=40),
        r"draft eagle3: PATH: target_hidden_size is 40, and the target's is 32",
    ),
    "a head of a wider model that does not say so": (
        lambda path: with_config(write_eagle(path, hidden_size=40), target_hidden_size=None),
        r"draft eagle3: PATH: fc\.weight \[32, 120\] reads no whole number of states of 32",
    ),
    "a head of a deeper model": (
        lambda path: with_config(
            write_eagle(path), eagle_aux_hidden_state_layer_ids=[2, 18, 33], eagle_config=None
        ),
        r"draft eagle3: PATH: it reads the states of layers \[2, 18, 33\], and the target has 2",
    ),
    "a block head of a deeper model": (
        lambda path: with_config(write_dflash(path), num_target_layers=36),
        r"draft dflash: PATH: num_target_layers is 36, and this model has 2",
    ),
    "another vocabulary": (
        lambda path: write_eagle(path, vocab_size=500),
        r"draft eagle3: PATH: vocab_size is 500, and the target's is 512",
    ),
    "a block head of another vocabulary": (
        lambda path: with_config(write_dflash(path), vocab_size=96),
        r"draft dflash: PATH: vocab_size is 96, and this model has 512",
    ),
    "other weights of the target": (
        lambda path: with_config(write_eagle(path), target_fingerprint="0" * 32),
        r"draft eagle3: PATH: it was trained for other weights of the target \(.*\)",
    ),
    "a cut header": (
        lambda path: cut(write_eagle(path), 40),
        r"PATH: model\.safetensors cannot be read: .*",
    ),
    "cut tensors": (
        lambda path: cut(write_eagle(path), 5000),
        r"PATH: model\.safetensors cannot be read: .*",
    ),
    "numbers that are none": (
        lambda path: with_tensors(
            write_eagle(path), **{"norm.weight": torch.full((32,), torch.nan)}
        ),
        r"draft eagle3: PATH: .*not finite: norm\.weight.*",
    ),
    "a configuration that is no JSON": (
        lambda path: folder_with(path, "config.json", "{'a': 1}"),
        r"PATH: config\.json cannot be read: .*",
    ),
    "unknown keys in eagle_config": (
        lambda path: with_config(write_eagle(path), eagle_config={"use_moon": True}),
        r"draft eagle3: PATH: config\.json has unknown keys: eagle_config\.use_moon",
    ),
    "unknown values in eagle_config": (
        lambda path: with_config(write_eagle(path), eagle_config={"use_mtp_layernorm": True}),
        r"draft eagle3: PATH: eagle_config\.use_mtp_layernorm is True, and only False is known",
    ),
    "unknown keys in dflash_config": (
        lambda path: write_dflash(path, moon=1),
        r"draft dflash: PATH: config\.json has unknown keys: dflash_config\.moon",
    ),
    "unknown tensors": (
        lambda path: with_tensors(write_eagle(path), **{"moon.weight": torch.ones(3)}),
        r"draft eagle3: PATH: unknown tensors: moon\.weight",
    ),
    "unknown tensors of a block head": (
        lambda path: with_tensors(write_dflash(path), **{"moon.weight": torch.ones(3)}),
        r"draft dflash: PATH: unknown tensors: moon\.weight",
    ),
    "a tensor of another shape": (
        lambda path: with_tensors(write_eagle(path), **{"norm.weight": torch.ones(31)}),
        r"draft eagle3: PATH: norm\.weight \[31\] instead of \[32\]",
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

    assert said(str(head), str(head)) == (
        "draft: two are called eagle3; name one of them: NAME=PATH"
    )
    assert said(f"x={head}", f"x={other}") == (
        "draft: two are called x; name one of them: NAME=PATH"
    )
    assert said(f"eagle3={other}", str(head)) == (
        "draft: two are called eagle3; name one of them: NAME=PATH"
    )
    for taken in ("ngram", "medusa", "auto", "none"):
        assert said(f"{taken}={head}") == (
            f"draft {taken}: a drafter has that name, and {head} is of the method eagle3; "
            "name it otherwise"
            if taken == "medusa"
            else f"draft {taken}: a drafter has that name; name it otherwise"
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
    done = subprocess.run(
        [*command, "--draft", f"x={path}"],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("slipstream: ")]
    assert said == [f"slipstream: draft x: {path}: vocab_size is 500, and the target's is 512"]
    assert "Traceback" not in done.stderr
