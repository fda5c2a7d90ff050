"""Texts that a model writes itself, by the engine: what it writes, and a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training import written
from training.head_data import load_texts
from training.tokenizer import save_tokenizer, train_tokenizer
from worlds.counting_target import VOCAB, counted, counting_model

PROMPTS = ["def total(prices):", "for name in names:", "print(name)", "return sum(prices)"]


@pytest.mark.parametrize("wrong", ["--prompts p --own-share 0.5", "--corpus c --own-share 1.5"])
def test_shares_that_mean_nothing_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        written.main(f"--model m --out o --tokens 9 {wrong}".split())


@pytest.mark.slow
def test_a_model_answers_prompts_that_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    counting_model().save_pretrained(model)
    save_tokenizer(train_tokenizer([f"{each}\n" for each in PROMPTS], VOCAB), model)
    given = tmp_path / "prompts.jsonl"
    given.write_text("\n".join(json.dumps({"prompt": each}) for each in PROMPTS))
    out = tmp_path / "texts.jsonl"

    def write(num_tokens: int) -> list[str]:
        options = f"--model {model} --prompts {given} --out {out} --tokens {num_tokens}"
        written.main([*options.split(), "--new-tokens", "16", "--at-once", "2"])
        return out.read_text().splitlines()

    first = write(60)
    texts = load_texts(out, VOCAB)
    assert len(texts) == len(first)
    assert sum(len(text.ids) - text.num_prompt for text in texts) >= 60
    for text, line in zip(texts, first, strict=True):
        row = json.loads(line)
        reply = list(text.ids[text.num_prompt :])
        assert row["kind"] == "given"
        if row["temperature"] == 0:
            assert reply == counted(text.ids[text.num_prompt - 1], len(reply) + 1)[1:]
    # A run that is killed leaves a part of a line.
    with out.open("a") as file:
        file.write(first[0][:20])
    again = write(100)
    assert again[: len(first)] == first

    with monkeypatch.context() as patch:
        patch.setattr(written, "_MOST_PROMPT_TOKENS", 0)
        with pytest.raises(ValueError, match="none of 3 prompts can be asked"):
            write(1000)
    assert len(again) > len(first)
