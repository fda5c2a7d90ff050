"""The measurement of drafting's own cost: what it replays, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import draft_cost
from bench.draft_cost import MODEL_FREE, HeldOut, PlayedTarget, Setting, Text, main, measure
from bench.workloads import CODE_FILE, EDITS_FILE
from drafters.tree import chain

PERIOD = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = Text(PERIOD * 3, PERIOD * 4, PERIOD * 4)


class Letters:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


@pytest.fixture
def held_out(tmp_path: Path) -> HeldOut:
    edit = {"messages": [{"role": "user", "content": "Edit.\n\nold = 1"}], "completion": "new = 1"}
    code = {"prompt": "def f(", "completion": "x):\n    return x"}
    (tmp_path / EDITS_FILE).write_text(json.dumps(edit) + "\n")
    (tmp_path / CODE_FILE).write_text(json.dumps(code) + "\n")
    return HeldOut(Letters(), tmp_path)


@pytest.mark.parametrize("name", MODEL_FREE)
def test_every_drafter_without_a_model_is_measured_to_the_end_of_the_text(name: str) -> None:
    for setting in (Setting(), Setting(16, 4, keep_finished=True), Setting(at_once=2)):
        cost = measure(name, "periods", [TEXT, TEXT], setting)
        assert cost.num_tokens == 2 * len(TEXT.completion)
        assert len(cost.draft) == len(cost.observe) <= cost.num_tokens
        assert min(cost.draft + cost.observe) >= 0
        assert name != "ngram" or cost.tokens_per_step > 4


def test_the_target_says_what_was_written_and_else_the_same_after_the_same_token() -> None:
    target = PlayedTarget(range(100))
    seen = target.observation("r", [7, 8, 9], chain([8, 50]), [0, 1], [8, 9], 4)
    assert [top[0] for top in seen.top_token_ids[:2]] == list(seen.row_token_ids[:2]) == [8, 9]
    assert list(seen.top_token_ids[2]) == target.rivals(50)[:4]
    assert all(len(top) == len(set(top)) == 4 for top in seen.top_token_ids)
    assert all(probs[0] == 0.7 for probs in seen.top_probs)


def test_texts_stand_behind_others_that_fill_the_context(held_out: HeldOut) -> None:
    text, again = held_out.texts("edit", 2, 100, 4)
    assert again.completion == text.completion
    prompt, completion, reference = (
        "".join(map(chr, each)) for each in (text.prompt, text.completion, text.reference)
    )
    assert len(prompt) == 100
    assert prompt.endswith("Edit.\n\nold = 1")
    assert "new" not in prompt
    assert (completion, reference) == ("new ", "old = 1")


def test_the_command_prints_a_table_and_writes_json(
    held_out: HeldOut,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(draft_cost, "load_tokenizer", lambda _: Letters())
    monkeypatch.setattr(draft_cost, "HeldOut", lambda _: held_out)
    written = tmp_path / "cost.json"
    assert main(["--drafters", "ngram", "stand", "--context", "50", "--json", str(written)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[-4:]] == ["ngram"] * 2 + ["stand"] * 2
    report = json.loads(written.read_text())
    assert report["setting"]["num_nodes"] == 8
    assert [each["workload"] for each in report["figures"]] == ["edit", "code"] * 2
    assert all(each["median"] <= each["p95"] for each in report["figures"])
