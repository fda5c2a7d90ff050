"""Prompts that somebody gives, for a model to answer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from training.prompts import GivenPrompts, Prompt, read_prompts

CHAT = [{"role": "user", "content": "count"}]


def test_prompts_are_texts_or_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"prompt": "a"}, {"messages": CHAT}])))
    assert read_prompts(path) == [Prompt("given", [], "a"), Prompt("given", CHAT)]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2: neither"):
        read_prompts(path)


def test_lines_of_prompts_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": "one\u2028two\x85three"}, ensure_ascii=False)
    path.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    assert read_prompts(path) == [Prompt("given", [], "one\u2028two\x85three")] * 2


def test_a_tenth_of_them_is_kept_aside() -> None:
    prompts = [Prompt("given", [], str(number)) for number in range(30)]

    def drawn(held_out: bool) -> set[str]:
        maker = GivenPrompts(random.Random(0), prompts, held_out)
        return {maker.draw().text for _ in range(500)}

    assert drawn(True) == {"0", "10", "20"}
    assert drawn(False) == {str(number) for number in range(30)} - drawn(True)


def test_prompts_that_cannot_be_asked_are_left_out() -> None:
    maker = GivenPrompts(random.Random(0), [Prompt("given", [], str(at)) for at in range(10)])
    assert maker.keep(lambda each: each.text in "34") == 7
    assert {maker.draw().text for _ in range(50)} == {"3", "4"}
    with pytest.raises(ValueError, match="none of 2 prompts"):
        maker.keep(lambda _: False)


def test_a_chat_that_was_given_goes_on() -> None:
    maker = GivenPrompts(random.Random(0), [Prompt("given", CHAT)] * 10)
    later = maker.follow_up(CHAT, "1 2 3")
    assert later.messages[:2] == [*CHAT, {"role": "assistant", "content": "1 2 3"}]
