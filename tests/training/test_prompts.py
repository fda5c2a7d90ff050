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


def test_a_tenth_of_them_is_kept_aside() -> None:
    prompts = [Prompt("given", [], str(number)) for number in range(30)]

    def drawn(held_out: bool) -> set[str]:
        maker = GivenPrompts(random.Random(0), prompts, held_out)
        return {maker.draw().text for _ in range(500)}

    assert drawn(True) == {"0", "10", "20"}
    assert drawn(False) == {str(number) for number in range(30)} - drawn(True)


def test_a_chat_that_was_given_goes_on() -> None:
    maker = GivenPrompts(random.Random(0), [Prompt("given", CHAT)] * 10)
    later = maker.follow_up(CHAT, "1 2 3")
    assert later.messages[:2] == [*CHAT, {"role": "assistant", "content": "1 2 3"}]
