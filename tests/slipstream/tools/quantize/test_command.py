"""The command writes a folder that is served in 8 bits, or one in 4, and measures what they change."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model.loader import load_model, load_tokenizer
from engine.model.quantization import complete_packed, quantization_info, round_inputs
from engine.weights.rounding.int8 import is_exact
from slipstream.tools.quantize import command
from slipstream.tools.quantize.check import compare
from worlds.commands import Run

HERE = Path(__file__).parent
CODE = "for index in range(10):\n    print(index)\n\n\ndef add(a, b):\n    return a + b\n" * 20
EMPTY = "/dev/null"
needs_int8 = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")


@needs_int8
def test_a_written_folder_is_served_in_8_bits(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in-8-bits"
    assert "42 linear layers in 8 bits" in run("quantize", "bundled", folder).out
    model = load_model(str(folder), torch.device("cpu"))
    complete_packed(model)
    info = quantization_info(model)
    assert (info.bits, info.num_layers, info.head) == (8, 43, True)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode(CODE, add_special_tokens=False)) == CODE
    assert tokenizer.chat_template
    run("quantize", folder, tmp_path / "again")
    assert "weights that came in few bits are made floats: 42 of 8 bits" in caplog.text


@needs_int8
def test_the_comparison_says_how_near_they_are(tmp_path: Path, run: Run) -> None:
    text = tmp_path / "text.py"
    text.write_text(CODE)
    arguments = ["quantize", "bundled", "--check", text, "--tokens", 300]
    found = json.loads(run(*arguments, "--json").out)
    assert found["num_tokens"] == 299
    assert 0 < found["kl"] < 0.01
    assert found["loss_int8"] == pytest.approx(found["loss"], rel=0.05)
    assert found["same_argmax"] > 0.9
    errors = found["layer_errors"]
    assert len(errors) == 43  # of six layers, and the head
    assert sorted(errors.values(), reverse=True) == list(errors.values())
    assert all(0 < error < 0.05 for error in errors.values())
    said = run(*arguments).out
    assert f"{found['loss']:.4f}, in 8 bits {found['loss_int8']:.4f}" in said
    assert said.rstrip().endswith(list(errors)[4])


@needs_int8
def test_what_is_compared_in_8_bits_is_what_is_written(tmp_path: Path, run: Run) -> None:
    text, folder = tmp_path / "text.py", tmp_path / "in-8-bits"
    text.write_text(CODE)
    arguments = ["quantize", "bundled", folder, "--check", text, "--tokens", 300]
    found = json.loads(run(*arguments, "--json").out)
    model, written = (load_model(each, torch.device("cpu")) for each in ("bundled", str(folder)))
    round_inputs(written)
    token_ids = load_tokenizer("bundled").encode(CODE, add_special_tokens=False)[:300]
    assert found["kl"] == pytest.approx(compare(model, written, token_ids, 8)["kl"], rel=1e-3)
    assert len(found["layer_errors"]) == 42


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(CODE * 4)
    return path


def test_a_folder_in_4_bits_has_what_was_measured(tmp_path: Path, text: Path, run: Run) -> None:
    folder = tmp_path / "in-4-bits"
    arguments = ["quantize", "bundled", folder, "--bits", 4, "--calibration", text]
    arguments += ["--calibration-tokens", 1024, "--tokens", 300]
    said = run(*arguments, "--most-kl", "1e-9", status=3)
    assert "above 1e-09: nothing is written" in said.err
    assert "parameters in 4 bits" in said.out
    assert not folder.exists()
    found = json.loads(run(*arguments, "--json").out)
    (tmp_path / "new").touch()
    rights = (tmp_path / "new").stat().st_mode
    assert {each.stat().st_mode for each in folder.iterdir()} == {rights}, "as other new files"
    assert found["bits"] == 4
    assert 0 < found["kl"] < 0.3
    assert found["loss_int4"] == pytest.approx(found["loss"], abs=0.3)
    assert len(found["layer_errors"]) == 42
    tensors = load_file(folder / "model.safetensors")
    assert sum(name.endswith(".weight_packed") for name in tensors) == 42
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (scheme["format"], scheme["ignore"]) == ("pack-quantized", ["lm_head"])
    assert (folder / "generation_config.json").is_file()
    assert load_tokenizer(str(folder)).chat_template
    assert "is not empty" in run(*arguments, "--json", status=2).err


def test_without_a_text_a_model_is_calibrated_on_its_own(
    text: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["bundled", "--bits", 4, "--calibration-tokens", 64, "--check", text]
    said = run("quantize", *arguments, "--tokens", 200, "--json")
    found = json.loads(said.out)
    assert found["num_tokens"] == 199
    assert ("does not survive 4 bits" in said.err) == (found["kl"] > 0.05)
    # What takes minutes says how far it is.
    told = [each for each in caplog.messages if each.startswith("4 bits:")]
    assert told == [
        "4 bits: writing token 32 of 64 of 1 texts to calibrate on",
        *(f"4 bits: decoder layer {number} of 6" for number in range(1, 7)),
    ]


@pytest.mark.parametrize(("kl", "warns"), [(0.049, False), (0.051, True), (float("nan"), True)])
def test_a_model_that_changes_too_much_is_not_called_good(
    kl: float, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(most_kl=None, bits=4)
    assert not command._too_far({"kl": kl}, arguments)
    assert ("take 8 bits or a larger model" in capsys.readouterr().err) == warns
    assert command._too_far({"kl": kl}, argparse.Namespace(most_kl=0.01, bits=4))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bundled"], "nothing to do"),
        (["bundled", str(HERE)], "is not empty"),
        (["bundled", "--check", str(HERE / "none.txt")], "none.txt"),
        (["bundled", "--check", __file__, "--tokens", "1"], "--tokens"),
        ([str(HERE), "--check", __file__], str(HERE)),
        (["bundled", __file__], "is no folder"),
        (["bundled", "new", "--calibration", __file__], "--calibration is for --bits 4"),
        (["bundled", "new", "--calibration-tokens", "64"], "--calibration-tokens is for --bits 4"),
        (["bundled", "new", "--tokens", "300"], "--tokens in 8 bits needs a text"),
        (["bundled", "new", "--json"], "--json in 8 bits needs a text"),
        (["bundled", "new", "--bits", "4", "--calibration-tokens", "31"], "--calibration-tokens"),
        (["bundled", "new", "--bits", "4", "--calibration", str(HERE / "none")], "none"),
        (["bundled", "new", "--bits", "4", "--calibration", EMPTY], "text to calibrate on has 0"),
        (["bundled", "new", "--bits", "4", "--calibration-tokens", "32"], "too short to hold"),
        (["bundled", "new", "--most-kl", "0.1"], "needs a text"),
        (["bundled", "--check", __file__, "--most-kl", "nan"], "--most-kl must be"),
        (["bundled", "new", "--bits", "4", "--check", EMPTY], "fewer than two tokens"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = run("quantize", *arguments, status=2).err
    assert error.startswith("slipstream quantize: ")
    assert error.count("\n") == 1
    assert part in error
    assert not list(tmp_path.iterdir())
