"""Text to calibrate on: the user's in pieces, or the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model.calibration.texts import beginnings, calibration_texts, write_texts
from engine.model.loader import load_model, load_tokenizer
from worlds.scripted_engine import byte_tokenizer
from worlds.tiny_models import ARCHITECTURES, VOCAB_SIZE, own_logits, tiny_model

FIRSTS = [[5, 6, 7], [8], [9, 10]]


def test_a_users_text_is_cut_into_pieces_spread_over_it() -> None:
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    text = "".join(f"{number:08d}" for number in range(400))
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = calibration_texts(model, tokenizer, text, 1024)
    assert found.shape == (4, 256)  # the model's longest text
    assert found[0].tolist() == ids[:256]
    assert found[-1].tolist() == ids[256 * 11 : 256 * 12]
    assert calibration_texts(model, tokenizer, text, 100_000).shape == (12, 256)
    with pytest.raises(ValueError, match="has 3 tokens, fewer than 256"):
        calibration_texts(model, tokenizer, "abc", 1024)


def test_a_model_goes_on_with_the_beginnings_in_turn() -> None:
    model = tiny_model("llama")
    found = write_texts(model, FIRSTS, 20, 40)
    assert found.shape == (20, 40)
    for number, row in enumerate(found.tolist()):
        first = FIRSTS[number % 3]
        assert row[: len(first)] == first
    assert 0 <= int(found.min()) <= int(found.max()) < VOCAB_SIZE
    assert torch.equal(write_texts(model, FIRSTS, 20, 40), found)


def test_a_long_template_loses_its_words_before_the_request() -> None:
    long = [[5, *range(20, 50), 6, 7]]
    found = write_texts(tiny_model("llama"), long, 1, 12)
    assert found[0, :6].tolist() == [5, 47, 48, 49, 6, 7]
    assert write_texts(tiny_model("llama"), long, 1, 3)[0, :1].tolist() == [5]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_every_kind_write(name: str) -> None:
    assert write_texts(tiny_model(name), FIRSTS, 2, 12).shape == (2, 12)


def test_what_it_writes_is_likely_to_it() -> None:
    """Mean log-probability of drawn tokens is minus the mean entropy, far above any other text's."""
    model = tiny_model("llama")
    gained, chance = [], []
    for row in write_texts(model, FIRSTS, 8, 48):
        likely = own_logits(model, row.tolist())[:-1].float().log_softmax(-1)
        gained.append(likely[3:].gather(1, row[4:, None]).mean() + _entropy(likely[3:]))
        chance.append(likely.mean() + _entropy(likely))
    assert abs(float(torch.stack(gained).mean())) < 0.3
    assert float(torch.stack(chance).mean()) < -2


def _entropy(likely: torch.Tensor) -> torch.Tensor:
    return -(likely.exp() * likely).sum(1).mean()


def test_a_model_with_a_chat_template_is_asked_too() -> None:
    model, tokenizer = load_model("bundled", torch.device("cpu")), load_tokenizer("bundled")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(asked, add_special_tokens=False)
    assert ids in beginnings(tokenizer)
    found = calibration_texts(model, tokenizer, None, 60)
    assert found.shape == (1, 60)
    untemplated: Any = byte_tokenizer()
    assert list(b"def ") in beginnings(untemplated)
