"""Logs are read strictly, and texts come with what the target says before each token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafters.base import GREEDY
from engine.sampling.noise import gumbel_list, request_key
from slipstream.tools.template.texts import LoggedText, read_log, replay_texts
from worlds.engine_harness import TINY_VOCAB, TinyTarget


class Numbers:
    """A tokenizer of numbers between spaces; 0 begins a text."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [int(word) for word in text.split()]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}


def test_lines_are_completions_and_how_they_were_drawn(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    drawn = {"prompt": "a", "completion": "b", "temperature": 0.7, "seed": 3, "top_p": 0.9}
    log.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n\n" + json.dumps(drawn))
    first, second = read_log(log)
    assert first == LoggedText("a", "b", GREEDY)
    assert (second.sampling.temperature, second.sampling.top_p) == (0.7, 0.9)
    assert second.sampling.noise(5, [1, 2]) == gumbel_list(request_key(3, 0), 5, [1, 2])


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = {"prompt": "a\u2028b", "completion": "c\x85d"}
    log.write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8")
    assert read_log(log) == [LoggedText("a\u2028b", "c\x85d", GREEDY)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ("[]", "object"),
        ('{"prompt": "a"}', "completion is missing"),
        ('{"prompt": 1, "completion": "b"}', "prompt is not"),
        ('{"prompt": "a", "completion": "b", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "completion": "b", "temperature": 1}', "seed is missing"),
        ('{"prompt": "a", "completion": "b", "seed": true}', "seed is not"),
        ('{"prompt": "a", "completion": "b", "sed": 1}', "'sed'"),
    ],
)
def test_a_bad_line_is_refused(tmp_path: Path, line: str, message: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_log(log)


def test_rows_are_the_targets_distributions_before_each_token() -> None:
    tiny_target = TinyTarget()
    texts = [LoggedText("1 2 3", "4 5", GREEDY), LoggedText("1", "", GREEDY)]
    (text,) = replay_texts(tiny_target.reference, Numbers(), texts, 4)  # type: ignore[arg-type]
    assert (text.prompt_token_ids, text.token_ids) == ([0, 1, 2, 3], [4, 5])
    probs = torch.softmax(tiny_target.logits([0, 1, 2, 3, 4])[-2:], dim=-1)
    assert probs.shape == (2, TINY_VOCAB)
    for row, expected in enumerate(probs):
        best = expected.topk(4)
        assert text.top_token_ids[row] == best.indices.tolist()
        assert text.top_probs[row] == pytest.approx(best.values.tolist(), rel=1e-4)
