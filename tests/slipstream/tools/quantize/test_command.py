"""The command writes a folder that is served in 8 bits, and measures what 8 bits change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.model.int8 import is_exact
from engine.model.loader import load_model, load_tokenizer
from engine.model.quantization import has_stored_weights, quantize_model
from slipstream.cli import main

HERE = Path(__file__).parent
CODE = "for index in range(10):\n    print(index)\n\n\ndef add(a, b):\n    return a + b\n" * 20
needs_int8 = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")


@needs_int8
def test_a_written_folder_is_served_in_8_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in-8-bits"
    assert main(["quantize", "bundled", str(folder)]) == 0
    assert "42 linear layers in 8 bits" in capsys.readouterr().out
    model = load_model(str(folder), torch.device("cpu"))
    assert has_stored_weights(model)
    assert quantize_model(model).share > 0.99
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode(CODE, add_special_tokens=False)) == CODE
    assert tokenizer.chat_template
    assert main(["quantize", str(folder), str(tmp_path / "again")]) == 2
    assert "have 8 bits already" in capsys.readouterr().err


@needs_int8
def test_the_comparison_says_how_near_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text(CODE)
    assert main(["quantize", "bundled", "--check", str(text), "--tokens", "300", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 299
    assert 0 < found["kl"] < 0.01
    assert found["loss_int8"] == pytest.approx(found["loss"], rel=0.05)
    assert found["same_argmax"] > 0.9
    errors = found["layer_errors"]
    assert len(errors) == 43  # of six layers, and the head
    assert sorted(errors.values(), reverse=True) == list(errors.values())
    assert all(0 < error < 0.05 for error in errors.values())
    assert main(["quantize", "bundled", "--check", str(text), "--tokens", "300"]) == 0
    said = capsys.readouterr().out
    assert f"{found['loss']:.4f}, in 8 bits {found['loss_int8']:.4f}" in said
    assert said.rstrip().endswith(list(errors)[4])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bundled"], "nothing to do"),
        (["bundled", str(HERE)], "is not empty"),
        (["bundled", "--check", str(HERE / "none.txt")], "none.txt"),
        (["bundled", "--check", __file__, "--tokens", "1"], "--tokens"),
        ([str(HERE), "--check", __file__], str(HERE)),
    ],
)
def test_what_cannot_be_done_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(["quantize", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slipstream quantize: ")
    assert part in error
